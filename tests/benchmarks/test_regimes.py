"""Changes of regime: every strategy writes the given text, and each is timed for the same tokens of a stretch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path

import pytest

from benchmarks.regimes.__main__ import cells_of
from benchmarks.regimes.forced import Forward
from benchmarks.regimes.page import ALIKE, AUTO, CLOCK, page
from benchmarks.regimes.texts import CALLS, COPY, PROSE, Given, Stretch, copied, fit, keep, kept, materials, questions
from benchmarks.regimes.trace import EARLY, LATE, STEPS, Step, Trace, Writer, parts, smoothed
from parlay import LLM
from parlay.bench.provenance import provenance
from parlay.bench.records import PLAIN, Cell, Results, Row

TEXT = Given(
    "1", (5, 6, 7, 8, 9, 10), (40, 41, 42, 6, 7, 8, 9, 10, 40, 41, 42), (Stretch(PROSE, 0, 3), Stretch(COPY, 3, 11))
)


@pytest.mark.parametrize("strategy", [PLAIN, "prompt-lookup:policy=fixed", "draft-model:policy=fixed", AUTO])
def test_every_strategy_writes_the_given_text_and_copies_are_accepted(strategy: str) -> None:
    with LLM("parlay-mini", router_memory="off") as llm:
        writer = Writer(llm)
        trace = writer.write(strategy, TEXT)
        assert trace.ends[-1] == len(TEXT.answer)
        assert [*trace.times] == sorted(trace.times)
        assert len(trace.ends) < len(TEXT.answer) or not strategy.startswith("prompt-lookup")
        assert writer.write(strategy, TEXT, 4).ends[-1] == 4


def trace_of(tokens: list[int], seconds: list[float], rows: list[int]) -> Trace:
    steps = [Step(Forward(each, False, taken - 0.25), 0.25) for each, taken in zip(rows, seconds, strict=True)]
    return Trace([*accumulate(tokens)], [*accumulate(seconds)], steps)


def test_the_tokens_of_a_step_come_evenly_within_it() -> None:
    trace = trace_of([1, 4, 1], [5.0, 2.0, 1.0], [6, 5, 1])
    assert [trace.at(place) for place in (1, 2, 3, 5, 6)] == [5.0, 5.5, 6.0, 7.0, 8.0]


def test_the_early_part_of_a_stretch_is_what_is_committed_in_the_first_steps_that_begin_there() -> None:
    """A step of three tokens leads into the stretch, which begins at 20; steps that follow bring two each."""
    trace = trace_of([19, 3, *[2] * 30], [1.0] * 32, [1] * 32)
    assert parts(Stretch(COPY, 20, 60), trace) == {EARLY: (20, 22 + 2 * STEPS), LATE: (22 + 2 * STEPS, 60)}
    assert parts(Stretch(COPY, 20, 30), trace) == {EARLY: (20, 30), LATE: (30, 30)}, "it is over before"
    assert parts(Stretch(PROSE, 0, 60), trace)[EARLY][0] == 19, "what came with the prompt's step took no decoding"


def test_a_step_that_was_slow_by_chance_counts_as_others_with_as_many_rows() -> None:
    slow = trace_of([1, 1, 1, 1], [9.0, 1.0, 7.0, 1.0], [6, 1, 1, 1])
    quick = trace_of([1, 2, 1], [9.0, 2.0, 1.0], [6, 3, 1])
    found = smoothed({"one": slow, "other": quick})
    assert found["one"].times == [0.0, 1.0, 2.0, 3.0]
    assert found["other"].times == [0.0, 2.0, 3.0]


def test_prose_ends_where_it_loops_and_is_none_where_it_copies_or_hardly_varies() -> None:
    varied = tuple(range(40))
    assert fit(varied, ()) == varied
    assert fit((*varied, *varied), ()) == varied
    assert fit(varied, (99, *varied)) == ()
    assert fit((1, 2, 1, 3, 1, 4, 1, 2) * 2, ()) == ()
    assert copied((*varied[:8], *range(50, 58)), varied) == 0.5


def test_materials_have_a_document_and_calls_that_repeat_their_keys() -> None:
    material = next(materials(None))
    question = next(questions(None))
    assert all(part in material.asked(question) for part in (material.document, "order(drink, size, count)", question))
    assert material.called.count('"arguments": {"drink": ') == len(material.calls) > 8
    assert len({*islice(questions(None), 4)}) == 4


def test_texts_are_kept_as_they_are(tmp_path: Path) -> None:
    keep(tmp_path / "folder" / "texts.json", [TEXT])
    assert kept(tmp_path / "folder" / "texts.json") == [TEXT]
    (tmp_path / "broken.json").write_text('[{"name": 1}]', encoding="utf-8")
    with pytest.raises(ValueError, match="holds no texts"):
        kept(tmp_path / "broken.json")


def test_each_stretch_has_a_cell_named_by_its_change() -> None:
    text = replace(TEXT, stretches=(*TEXT.stretches, Stretch(CALLS, 11, 12)))
    found = cells_of("m", text, (PLAIN, AUTO))
    assert [own[0].part for own in found] == ["start to prose", "prose to copy", "copy to calls"]
    assert [cell.strategy for cell in found[0]] == [PLAIN, AUTO]


def row(strategy: str, part: str, workload: str, late: float, early: float) -> Row:
    """Seconds for 50 tokens each; by the clock twice as many."""
    values: Mapping[str, float] = {
        f"{LATE} tokens": 50,
        f"{EARLY} tokens": 50,
        **{f"{LATE} {kind}": late * factor for kind, factor in ((ALIKE, 1), (CLOCK, 2))},
        **{f"{EARLY} {kind}": early * factor for kind, factor in ((ALIKE, 1), (CLOCK, 2))},
    }
    return Row(cell=Cell(part=part, model="m", strategy=strategy, workload=workload), requests=1, values=values)


def test_the_page_compares_auto_with_the_best_of_each_stretch_and_leaves_out_what_is_no_change(tmp_path: Path) -> None:
    results = Results(tmp_path / "r.jsonl", provenance("x"))
    for part, workload, other in (("start to prose", "1.1", 1.0), ("prose to copy", "1.2", 5.0)):
        results.add([row(PLAIN, part, workload, 10, 10), row("prompt-lookup", part, workload, other, 8)])
        results.add([row(AUTO, part, workload, 6.25, 16)])
    told = page(results.header, results.rows)
    assert "Stretches after a change: 1; rounds: 1." in told
    assert "| late | alike | 1 | 0.80 | 0.80 | 0.80 | 0.80 |" in told
    assert "| early | clock | 1 | 0.50 | 0.50 | 0.50 | 0.50 |" in told
    assert "| prose to copy | 1.00 | 2.00 | 1.60 | 0.80 | 0.50 |" in told
