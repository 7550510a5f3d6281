"""The race of strategies on one's own prompts: what it promises of its verdict, its intervals and its time."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from parlay.bench.records import Results
from parlay.bench.summary import Interval, student_t, whole_rate
from parlay.bench.trial import Candidate, Trial, choose, run, usual_strategies, without_training
from parlay.bench.wave import Ask, OutOfTime, Waves
from parlay.bench.workloads import Item
from parlay.llm import LLM

PROMPTS = tuple(Item(id=text, prompt=text) for text in ("abcabcabc", "xyzxyzxyz", "121212", "hello"))


def candidate(strategy: str, speed: float, low: float, rounds: int = 3, same: int = 8) -> Candidate:
    return Candidate(
        strategy=strategy,
        prompts=8,
        rounds=rounds,
        tokens_per_second=1.0,
        speed=speed,
        low=low,
        high=2 * speed - low,
        tokens_per_step=1.0,
        same=same,
        of=8,
    )


def test_each_strategy_is_paired_with_plain_decoding_of_the_same_prompt(tiny: LLM, tmp_path: Path) -> None:
    trial = Trial(strategies=("prompt-lookup", "jacobi"), prompts=PROMPTS, rounds=2, max_tokens=20)
    announced: list[str] = []
    noted: list[str] = []
    found = run(tiny, trial, Results(tmp_path / "rows.jsonl", {}), announced.append, noted.append)
    assert {each.strategy for each in found.candidates} == {"prompt-lookup", "jacobi"}
    assert announced[0] == "timing plain decoding of a prompt, 20 tokens at most"
    assert "2 strategies on " in announced[1]
    assert "each takes about" in announced[1]
    assert "at most 5 minutes" in announced[1]
    assert "strategies left" in noted[0]
    assert found.plain > 0
    for each in found.candidates:
        assert each.same == each.of > 0
        assert each.low is None or each.speed is None or each.high is None or each.low < each.speed < each.high


def test_time_bounds_how_many_prompts_and_strategies_are_tried(tiny: LLM, tmp_path: Path) -> None:
    names = without_training(tiny)
    trial = Trial(strategies=names, prompts=PROMPTS, minutes=1e-6, max_tokens=20)
    found = run(tiny, trial, Results(tmp_path / "rows.jsonl", {}), bool, bool)
    assert len(found.candidates) == 2
    assert found.left_out == names[2:]
    assert {each.prompts for each in found.candidates} == {1}
    assert (found.best, found.lacking, found.unreached) == (None, 4, len(PROMPTS) - 1)


def test_what_was_done_before_counts_and_answers_are_shortened(tiny: LLM, tmp_path: Path) -> None:
    """A model that took all of the minutes to load leaves time for one short answer of two strategies."""
    trial = Trial(strategies=("prompt-lookup", "jacobi"), prompts=PROMPTS, max_tokens=20, began=time.monotonic() - 400)
    announced: list[str] = []
    found = run(tiny, trial, Results(tmp_path / "rows.jsonl", {}), announced.append, bool)
    assert announced[0] == "timing plain decoding of a prompt, 16 tokens at most (not 20, because time is short)"
    over = re.search(r"at most 5 minutes, (\d+) s of them have passed", announced[1])
    assert over is not None
    assert int(over[1]) >= 400
    assert {each.prompts for each in found.candidates} == {1}


def test_decoding_stops_when_time_is_over(tiny: LLM) -> None:
    waves = Waves(tiny)
    waves.ends = time.monotonic()
    with pytest.raises(OutOfTime):
        waves.decode("none", [Ask(ids=(1, 2, 3), most=20)], 0.0)
    assert tiny.engine.idle


def test_prompts_that_leave_nothing_to_time_are_one_line(tiny: LLM, tmp_path: Path) -> None:
    trial = Trial(strategies=("prompt-lookup",), prompts=(Item(id="0", prompt="a" * 400),))
    with pytest.raises(ValueError, match="no prompt leaves anything to time: 1 of 1 prompts left out: no room"):
        run(tiny, trial, Results(tmp_path / "rows.jsonl", {}), bool, bool)


def test_a_model_without_a_tokenizer_is_one_line(tiny_folder: Path, tmp_path: Path) -> None:
    """With what to do, and without the name of an exception."""
    trial = Trial(strategies=("prompt-lookup",), prompts=PROMPTS)
    with (
        LLM(str(tiny_folder), dtype="float32", strategy="none") as llm,
        pytest.raises(ValueError, match="leaves anything to time: this model came without a tokenizer: name one"),
    ):
        run(llm, trial, Results(tmp_path / "rows.jsonl", {}), bool, bool)


def test_only_a_sure_gain_with_equal_texts_is_recommended_and_the_default_where_it_equals_the_best() -> None:
    fast, unsure, wrong = candidate("a", 1.5, 1.2), candidate("b", 1.6, 0.9), candidate("c", 2.0, 1.9, same=7)
    assert choose([unsure, fast, wrong]) is fast
    assert choose([unsure, wrong]) is None
    assert choose([fast, candidate("d", 1.9, 1.8, rounds=1)]) is fast, "not one that left the race early"
    usual = candidate("auto", 1.48, 1.1)
    assert choose([fast, usual]) is usual
    assert choose([]) is None
    assert choose([replace(fast, prompts=4), replace(fast, prompts=4, low=None, high=None)]) is None, "too few prompts"


def test_a_gain_that_the_prompt_eats_up_is_not_recommended(tiny: LLM, tmp_path: Path) -> None:
    """A model that drafts reads the prompt too, before the first token, where decoding speed does not look."""
    late = replace(candidate("a", 1.5, 1.2), whole=0.9)
    assert choose([late]) is None
    assert choose([late, candidate("b", 1.4, 1.1)]) is not None
    trial = Trial(strategies=("prompt-lookup",), prompts=PROMPTS, rounds=1, max_tokens=20)
    results = Results(tmp_path / "rows.jsonl", {})
    (found,) = run(tiny, trial, results, bool, bool).candidates
    plain = {row.cell.workload: whole_rate(row) for row in results.rows if row.cell.strategy == "none" and row.requests}
    rows = [row for row in results.rows if row.cell.strategy == "prompt-lookup" and row.cell.workload in plain]
    ratios = [whole_rate(row) / plain[row.cell.workload] for row in rows]
    assert found.whole is not None
    rounding = 1e-12  # of a mean of logarithms
    assert min(ratios) * (1 - rounding) <= found.whole <= max(ratios) * (1 + rounding)


def test_an_interval_is_students_t_on_logarithms_and_needs_two_prompts() -> None:
    found = Interval.of([1.0, 4.0])
    assert found is not None
    assert found.mean == pytest.approx(2.0)
    assert found.low * found.high == pytest.approx(4.0)
    assert found.high > 1000, "two prompts show next to nothing"
    many = Interval.of([1.9, 2.1] * 20)
    assert many is not None
    assert 1.95 < many.low < 2.0 < many.high < 2.05
    assert Interval.of([1.5]) is None


def test_intervals_that_hold_together_are_as_wide_as_student_and_bonferroni_say() -> None:
    """Against the tables: 5 % on both sides together, and a fifth of that."""
    known = {(1, 1): 12.706, (2, 1): 4.303, (5, 1): 2.571, (30, 1): 2.042, (4, 5): 4.604, (9, 5): 3.250}
    assert {case: round(student_t(*case), 3) for case in known} == known
    alone, among = Interval.of([1.1, 1.2, 1.3]), Interval.of([1.1, 1.2, 1.3], 15)
    assert alone is not None
    assert among is not None
    assert among.low < alone.low < among.mean == alone.mean


def test_the_default_a_draft_model_and_ones_own_drafters_are_tried_first(tiny: LLM) -> None:
    with LLM("parlay-mini", dtype="float32", router_memory="off") as llm:
        assert usual_strategies(llm, ["eagle3:head=mine"])[:3] == ("auto", "draft-model", "eagle3:head=mine")
    names = usual_strategies(tiny)
    assert names[0] == "auto"
    assert "draft-model" not in names, "this model has none"
    assert len(names) > 10
