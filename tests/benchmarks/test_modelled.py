"""What a draft head would gain with a larger target follows from its measured tokens per step."""

from __future__ import annotations

import pytest

from benchmarks.drafters.modelled import LARGE, NODES, Large, gain, lines, spec
from parlay.bench.records import PLAIN, Cell, Row


def row(strategy: str, tokens: int, steps: int) -> Row:
    cell = Cell(model="m", strategy=strategy, workload="prose")
    return Row(cell=cell, requests=1, tokens=tokens, steps=steps, same=1, of=1)


@pytest.mark.parametrize("large", LARGE, ids=[large.name for large in LARGE])
def test_a_head_that_is_never_right_gains_nothing_and_a_better_one_gains_more(large: Large) -> None:
    never = gain("eagle3", large, dict.fromkeys(NODES, 1.0))
    some, more = (gain("eagle3", large, {nodes: 1 + share * nodes**0.5 for nodes in NODES}) for share in (0.3, 0.6))
    assert never == 1.0
    assert 1 < some < more < 1 + 0.6 * max(NODES) ** 0.5


def test_the_same_accuracy_is_worth_more_where_the_head_is_a_smaller_part_of_the_target() -> None:
    tokens = {1: 1.5, 2: 1.7, 4: 2.0}
    gains = [gain("eagle3", large, tokens) for large in LARGE]
    assert gains == sorted(gains)
    assert gains[0] < gains[-1] < 2.0


def test_a_line_has_the_tokens_of_every_number_of_nodes_over_all_kinds_of_text() -> None:
    rows = [row(spec("eagle3", nodes, ""), 10 * nodes, 10) for nodes in NODES] + [row(PLAIN, 10, 10)]
    (line,) = lines(rows, {"eagle3": {"rows": 1200, "acceptance": [0.5, 0.25, 0.125, 0.0625]}})
    assert line[:3] == ("`eagle3`", "1,200", "50.0, 25.0, 12.5")
    assert line[3 : 3 + len(NODES)] == tuple(f"{nodes:.2f}" for nodes in NODES)
    assert line[-1] == "5/5"


def test_a_card_that_does_not_say_how_its_head_was_trained_leaves_cells_empty() -> None:
    (line,) = lines([row(spec("medusa", 1, ""), 10, 10)], {"medusa": {}})
    assert line[:3] == ("`medusa`", "", "")
