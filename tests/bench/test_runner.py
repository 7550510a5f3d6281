"""The measurement: every strategy beside plain decoding in every round, and what goes wrong is a row that says so."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parlay.bench.loops import first_loop
from parlay.bench.prepare import Preparation
from parlay.bench.records import OURS, Results, Row, read
from parlay.bench.runner import Bench, BenchPlan
from parlay.bench.summary import summarise
from parlay.bench.table import table
from parlay.bench.wave import Ask, Wave, Waves
from parlay.bench.workloads import Item, Message, Workload
from parlay.cost.energy import Counter, EnergyMeter
from parlay.llm import LLM
from parlay.types import PowerModel
from tests.bench.conftest import LETTERS

PLAN = BenchPlan(
    model="tiny", strategies=("prompt-lookup:policy=fixed",), workloads=(LETTERS,), rounds=2, keep_loops=True
)
HEADER = {"machine": "m"}


def measure(llm: LLM, plan: BenchPlan, path: Path) -> list[Row]:
    Bench(llm, plan, Results(path, HEADER)).run()
    return read(path)[1]


@pytest.mark.parametrize(("ratios", "rounds"), [((2.0, 2.0), 2), ((1.0, 3.0), 3)])
def test_a_cell_gets_more_rounds_while_its_ratio_is_uncertain(
    tiny: LLM, tmp_path: Path, ratios: tuple[float, ...], rounds: int
) -> None:
    plan, results = replace(PLAN, most_rounds=3), Results(tmp_path / "rows.jsonl", HEADER)
    (setting,) = plan.settings()
    for turn, ratio in enumerate(ratios):
        for cell, seconds in zip(plan.cells_of(setting), (1.0, 1.0 / ratio), strict=True):
            row = Row(cell=cell, round=turn, requests=1, tokens=9, decode_tokens=8, decode_seconds=seconds)
            results.add([row])
    Bench(tiny, plan, results).run()
    assert [len(results.of(cell)) for cell in plan.cells()] == [rounds, rounds]


def test_a_round_holds_every_strategy_once_and_counts_all_that_it_did(tiny: LLM, tmp_path: Path) -> None:
    rows = measure(tiny, replace(PLAN, max_tokens=80), tmp_path / "rows.jsonl")
    assert [(row.cell.strategy, row.round) for row in rows] == [
        (system.strategy, turn) for turn in (0, 1) for system in PLAN.systems
    ]
    for row in rows:
        assert (row.requests, row.same, row.of, row.exactness, row.error) == (3, 3, 3, "bits", "")
        assert row.tokens == rows[0].tokens
        assert len(row.ttft) == 3
        assert row.seconds >= row.decode_seconds > 0
        assert row.prefill_seconds + row.draft_seconds + row.verify_seconds + row.overhead_seconds <= row.seconds
        assert row.proposed == sum(row.proposed_by_source.values())
        assert row.accepted == sum(row.accepted_by_source.values())
    plain, drafted = rows[:2]
    assert (plain.steps, plain.decode_tokens, plain.proposed) == (plain.tokens, plain.tokens - 3, 0)
    assert drafted.accepted == drafted.tokens - drafted.steps > 0


def test_a_meters_joules_are_those_of_the_waves_and_a_counter_that_stands_still_gives_none(
    tiny: LLM, tmp_path: Path
) -> None:
    """Each reading of the counter is two joules more: two readings a wave, three waves a row."""
    moving = itertools.count(step=2)
    for name, read_counter, joules in (("moving", lambda: next(moving), 6.0), ("still", lambda: 7, None)):
        path, meter = tmp_path / f"{name}.jsonl", EnergyMeter([Counter("fake", read_counter, 1.0)], name)
        Bench(tiny, PLAN, Results(path, HEADER), {OURS: Waves(tiny, meter)}).run()
        rows = read(path)[1]
        assert {row.joules for row in rows} == {joules}
        assert {row.energy for row in rows} == {"measured" if joules else ""}


def test_joules_of_a_known_power_are_modelled_ones_and_no_measured_ones(tiny: LLM, tmp_path: Path) -> None:
    path, power = tmp_path / "modelled.jsonl", PowerModel(2.0, 0.5, "modelled from a test")
    Bench(tiny, PLAN, Results(path, HEADER), {OURS: Waves(tiny, EnergyMeter([], "none here"), power)}).run()
    rows = read(path)[1]
    assert {row.energy for row in rows} == {"modelled"}
    assert all(row.joules is not None and row.joules > 0.5 * row.steps for row in rows)
    summaries = summarise(rows)
    assert all(each.joules_per_token is None and each.modelled_joules_per_token for each in summaries)
    assert "J/token, modelled" in table(summaries)


def test_requests_go_together_in_full_waves_and_each_is_cold(
    tiny: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    decode = Waves.decode

    def spy(self: Waves, strategy: str, asks: Sequence[Ask], temperature: float) -> Wave:
        wave = decode(self, strategy, asks, temperature)
        sizes.append(len(asks))
        assert all(answer.metrics.cached_tokens == 0 for answer in wave.answers)
        assert wave.peak_memory_bytes > 0
        return wave

    monkeypatch.setattr(Waves, "decode", spy)
    long = Workload("long", tuple(replace(item, prompt=40 * item.prompt) for item in LETTERS.items))
    plan = replace(PLAN, workloads=(long,), concurrency=(2,), temperatures=(0.0, 1.0), rounds=1)
    rows = measure(tiny, plan, tmp_path / "rows.jsonl")
    assert [(row.requests, row.same, row.of, row.error) for row in rows] == [(4, 4, 4, "")] * 4
    assert sizes == [3, *[2] * 4, *[2] * 4, 3, *[2] * 4]  # goals, warm-up, waves; goals, waves


def test_an_interrupted_run_goes_on_and_a_strategy_may_join_later(tiny: LLM, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    def interrupt(rows: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Bench(tiny, PLAN, Results(path, HEADER)).run(interrupt)
    assert [row.round for row in read(path)[1]] == [0, 0]
    bench = Bench(tiny, PLAN, Results(path, HEADER))
    assert bench.left == 2
    bench.run()
    assert [row.round for row in read(path)[1]] == [0, 0, 1, 1]
    assert Bench(tiny, PLAN, Results(path, HEADER)).left == 0
    joined = replace(PLAN, strategies=(*PLAN.strategies, "jacobi"))
    assert Bench(tiny, joined, Results(path, HEADER)).left == 4
    rows = measure(tiny, joined, path)[4:]
    assert [(row.cell.strategy, row.round) for row in rows] == [("none", 2), ("jacobi", 2), ("none", 3), ("jacobi", 3)]


def test_a_strategy_without_its_drafter_is_a_row_that_says_so(tiny: LLM, tmp_path: Path) -> None:
    rows = measure(tiny, replace(PLAN, strategies=("draft-model",), rounds=1), tmp_path / "rows.jsonl")
    plain, failed = rows
    assert plain.same == 3
    assert "draft model" in failed.error
    assert failed.requests == 0


def test_a_crash_on_the_way_is_a_row_and_stops_nobody_else(
    tiny: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = type(tiny.engine).step
    seen: list[int] = []

    def breaks(engine: Any) -> Any:
        if any(name.startswith("jacobi") for name in engine.requests.strategies()):
            seen.append(1)
            if len(seen) == 30:
                raise RuntimeError("out of\nluck")
        return step(engine)

    monkeypatch.setattr(type(tiny.engine), "step", breaks)
    rows = measure(tiny, replace(PLAN, strategies=("jacobi", *PLAN.strategies), rounds=1), tmp_path / "rows.jsonl")
    assert [row.error for row in rows] == ["", "RuntimeError: out of luck", ""]
    assert rows[2].same == 3
    assert tiny.engine.idle


def test_an_answer_ends_before_its_first_loop_and_a_note_counts_who_is_left_out(tiny: LLM) -> None:
    preparation = Preparation(tiny, Waves(tiny), most=100)
    whole = replace(preparation, keep_loops=True).prepare(LETTERS, 0.0, 0)
    cut = preparation.prepare(LETTERS, 0.0, 0)
    lengths = [(first_loop(goal), len(goal)) for goal in whole.goals]
    assert any(fresh < all_of_it for fresh, all_of_it in lengths), "this model repeats itself"
    kept = [fresh for fresh, all_of_it in lengths if fresh >= min(16, all_of_it)]
    assert [len(goal) for goal in cut.goals] == kept
    assert [ask.most for ask in cut.asks] == kept
    out = 3 - len(kept)
    assert cut.note == (f"{out} of 3 prompts left out: the answer repeats itself at once" if out else "")
    assert cut.looped == whole.looped
    assert cut.looped


def test_follow_ups_are_asked_after_plain_decodings_answer(tiny: LLM) -> None:
    talk = Workload("talk", (Item(id="0", messages=(Message("user", "abc"),), follow_ups=("def",), max_tokens=8),))
    done = Preparation(tiny, Waves(tiny), keep_loops=True).prepare(talk, 0.0, 0)
    first, second = (ask.ids for ask in done.asks)
    assert second[: len(first) - 2] == first[:-2]  # two line ends close a prompt where there is no chat format
    assert second[len(first) : len(first) + 8] == done.goals[0]


def test_rows_say_which_times_are_of_one_conversation(tiny: LLM, tmp_path: Path) -> None:
    one = Item(id="0", messages=(Message("user", "abc"),), follow_ups=("def",), max_tokens=8)
    talks = Workload("talk", (one, replace(one, id="1", messages=(Message("user", "ghi"),), follow_ups=())))
    rows = measure(tiny, replace(PLAN, workloads=(talks,), rounds=1), tmp_path / "rows.jsonl")
    assert {row.talks for row in rows} == {(0, 1, 0)}
    assert {row.talks for row in measure(tiny, PLAN, tmp_path / "prompts.jsonl")} == {()}


def test_filler_makes_prompts_as_long_as_asked_and_what_has_no_room_is_left_out(tiny: LLM, tmp_path: Path) -> None:
    preparation = Preparation(tiny, Waves(tiny), keep_loops=True)
    padded = preparation.prepare(LETTERS, 0.0, 100)
    assert [len(ask.ids) for ask in padded.asks] == [100] * 3
    assert len({ask.ids[:99] for ask in padded.asks}) == 1
    rows = measure(tiny, replace(PLAN, contexts=(250,), rounds=1), tmp_path / "rows.jsonl")
    assert {row.note for row in rows} == {"3 of 3 prompts left out: no room in the context"}
    assert {row.requests for row in rows} == {0}


def test_no_filler_is_made_for_a_context_that_the_model_has_not(
    tiny: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of 100,000,000 tokens, by a slip."""
    monkeypatch.setattr("parlay.bench.prepare.book", None)
    rows = measure(tiny, replace(PLAN, contexts=(100_000,), rounds=1), tmp_path / "rows.jsonl")
    assert {row.note for row in rows} == {"3 of 3 prompts left out: no room in the context"}
    assert {row.requests for row in rows} == {0}


def test_a_text_that_differs_is_counted(tiny: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = Preparation.prepare

    def wrong(self: Preparation, workload: Workload, temperature: float, context: int) -> Any:
        done = prepare(self, workload, temperature, context)
        return replace(done, goals=((0,), *done.goals[1:]))

    monkeypatch.setattr(Preparation, "prepare", wrong)
    rows = measure(tiny, replace(PLAN, rounds=1), tmp_path / "rows.jsonl")
    assert [(row.same, row.of) for row in rows] == [(2, 3), (2, 3)]


def test_what_promises_no_text_is_not_compared(tiny: LLM, tmp_path: Path) -> None:
    plan = replace(PLAN, strategies=("prompt-lookup:rule=typical",), temperatures=(1.0,), rounds=1)
    rows = measure(tiny, plan, tmp_path / "rows.jsonl")
    assert [(row.exactness, row.of) for row in rows] == [("bits", 3), ("lossy", 0)]
