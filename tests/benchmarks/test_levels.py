"""The table of what draft models' trees cost: a line for each strategy and context, versions of the source beside."""

from dataclasses import replace

from benchmarks.drafters import levels
from benchmarks.drafters.levels import NODES, STRATEGIES, milliseconds, page, table, trees_of
from parlay.models import load


def test_each_strategy_writes_trees_of_the_size_that_is_measured() -> None:
    runner = load("parlay-mini-draft")
    for spec in STRATEGIES:
        measured = trees_of(spec, runner, 20)
        assert len(measured.seconds) == levels.TREES
        assert min(measured.seconds) > 0
        assert NODES - 2 <= measured.nodes <= NODES
        assert measured.depth > 2


def test_versions_stand_side_by_side_with_the_ratio_of_the_first_to_the_last() -> None:
    one = levels.Measured("sequoia", 300, (0.004, 0.002, 0.003), 16.0, 4.0)
    half = replace(one, seconds=(0.001, 0.002, 0.0015))
    assert milliseconds([[one], [one]], 0) == 3.0
    result = table(["before", "after"], [[[one]], [[half]]])
    assert result.splitlines()[-1] == "| sequoia | 300 | 16.0 | 4.0 | 3.00 | 1.50 | 2.00 |"
    assert "| before | after | ratio |" in page("command", "draft", result)
    assert "ratio" not in table(["src"], [[[one]]])
