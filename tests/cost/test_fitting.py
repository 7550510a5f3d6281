"""A calibration finds the machine again: from synthetic times, through its file, and by timing forwards."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from parlay.cost.calibrate import SHAPES, WORKS, MachineCalibration, calibrate, load, measure, with_engine
from parlay.cost.fitting import TimedForward, fit, median_error, relative_errors
from parlay.cost.overheads import Overheads
from parlay.cost.roofline import ForwardShape, Machine, ModelShape
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import NO_SKIP, Output, ParlayError, Runner, Segment, Skip

MACHINE = Machine(
    bandwidth=1.7e10,
    rate=2.4e11,
    attention_bandwidth=9e9,
    attention_rate=4e10,
    vector_bandwidth=6e9,
    layer_seconds=8e-5,
    attend_seconds=4e-5,
    forward_seconds=3e-4,
    cached_bandwidth=6e10,
    cached_rate=3e11,
    cached_attention_bandwidth=3e10,
    cache_bytes=32e6,
)
ENGINE = Overheads(step=1e-4, sequence=2e-5, node=1e-6, level=3e-4)
TINY = ModelShape(
    vocab_size=24,
    hidden_size=8,
    intermediate_size=16,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    weight_bytes=4,
    kv_bytes=4,
)


def synthetic(machine: Machine, shapes: Sequence[ModelShape] = SHAPES, noise: float = 0.0) -> list[TimedForward]:
    chance = random.Random(0)
    kept = [replace(shape, kv_bytes=4) for shape in shapes]
    return [
        TimedForward(shape, work, machine.forward(shape, work) * (1 + noise * chance.random()))
        for shape in kept
        for work in WORKS
    ]


def test_it_recovers_the_constants_from_synthetic_times() -> None:
    """Each within some percent, what is predicted within a tenth of one."""
    found = fit(synthetic(MACHINE), MACHINE.cache_bytes)
    assert median_error(found, synthetic(MACHINE)) < 1e-3
    known = asdict(MACHINE)
    for name, value in asdict(found).items():
        if name != "engine":
            assert value == pytest.approx(known[name], rel=0.05), name


def test_shapes_that_were_not_fitted_are_predicted_too() -> None:
    """Under noise that only ever adds, as delays do."""
    found = fit(synthetic(MACHINE, noise=0.15), MACHINE.cache_bytes)
    others = [
        replace(SHAPES[1], num_layers=8),
        replace(SHAPES[2], hidden_size=768, num_heads=12, num_kv_heads=4, num_layers=12),
    ]
    assert median_error(found, synthetic(MACHINE, others)) < 0.12


def test_a_machine_without_some_cost_is_found_without_it() -> None:
    """No number turns negative to make up for another."""
    free = replace(MACHINE, layer_seconds=0.0, attend_seconds=0.0)
    found = fit(synthetic(free, noise=0.02), MACHINE.cache_bytes)
    assert found.layer_seconds < 1e-5
    assert min(value for name, value in asdict(found).items() if name != "engine") >= 0
    assert median_error(found, synthetic(free)) < 0.03


def test_where_all_weights_come_from_one_place_the_other_is_taken_to_be_as_fast() -> None:
    """Small shapes alone say nothing of memory, large ones nothing of the cache."""
    for shapes, known in ((SHAPES[:2], "cached_bandwidth"), (SHAPES[2:], "bandwidth")):
        found = fit(synthetic(MACHINE, shapes), MACHINE.cache_bytes)
        assert found.bandwidth == found.cached_bandwidth
        assert found.bandwidth == pytest.approx(asdict(MACHINE)[known], rel=0.1)


def test_memory_that_becomes_slower_meanwhile_changes_no_constant() -> None:
    """If it was measured how fast memory was. The machine is told for the fastest memory, and for any other."""
    machine = replace(MACHINE, read_bandwidth=6e10)
    samples = [
        TimedForward(each.shape, each.work, machine.at(read).forward(each.shape, each.work), read)
        for place, each in enumerate(synthetic(MACHINE))
        for read in [6e10 if place % 3 else 2.5e10]
    ]
    found = fit(samples, MACHINE.cache_bytes)
    assert max(relative_errors(found, samples)) < 1e-3
    assert found.read_bandwidth == 6e10
    assert found.bandwidth == pytest.approx(MACHINE.bandwidth, rel=0.05)
    large = ModelShape(**{**asdict(SHAPES[2]), "num_layers": 28})
    alone, many = ForwardShape(context=64), ForwardShape(rows=256, context=64)
    slowed = [found.at(2e10).forward(large, work) / found.forward(large, work) for work in (alone, many)]
    assert slowed[0] > 2.5
    assert slowed[1] < 1.1  # many rows wait for arithmetic
    assert MACHINE.at(1e10) == MACHINE  # nobody has measured its memory


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="3 timed forwards are too few"):
        fit(synthetic(MACHINE)[:3])


# ---------------------------------------------------------------------------------------------------- by timing


class Watched(ToyRunner):
    """Notes the contexts and rows that are fed after each prefill."""

    def __init__(self) -> None:
        super().__init__(RandomLogits(24), 24, capacity=4096)
        self.fed: list[tuple[int, int]] = []

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        if segments[0].logits_from == 0:
            self.fed.append((len(segments), segments[0].rows))
        return super().forward(segments, taps, skip)


def test_forwards_are_timed_behind_the_context_and_batch_that_they_name() -> None:
    runner = Watched()
    works = [
        ForwardShape(batch=batch, rows=rows, context=context)
        for context in (16, 40)
        for batch in (1, 3)
        for rows in (1, 4)
    ]
    timed = list(measure(runner, works, rounds=2))
    assert {each.work for each in timed} == set(works)
    assert all(0 < each.seconds < 10 for each in timed)
    assert {(work.batch, work.rows) for work in works} == set(runner.fed)
    runner.check()
    assert runner.free_tokens() == runner.capacity()  # nothing is left behind


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    works = [ForwardShape(batch=batch, rows=rows, context=16) for batch in (1, 2) for rows in (1, 2, 4, 8)]

    def open_runner(shape: ModelShape) -> tuple[Runner, ModelShape]:
        return Watched(), shape

    made = with_engine(calibrate(open_runner, {"dtype": "float32"}, shapes=[TINY], works=works), ENGINE)
    path = tmp_path / "new" / "calibration.json"
    made.save(path)
    assert load(path) == made
    assert (made.machine.engine, len(made.samples)) == (ENGINE, 8)
    assert json.loads(path.read_text())["provenance"] == {"dtype": "float32"}


def test_a_runner_without_room_is_named() -> None:
    runner = ToyRunner(RandomLogits(24), 24, capacity=32)
    runner.open(7, ())
    runner.reserve(7, 24)
    with pytest.raises(ParlayError, match="no room for 20 tokens"):
        list(measure(runner, [ForwardShape(rows=4, context=16)]))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not a calibration"),
        ("[]", "is not a calibration"),
        ('{"format": 3, "machine": {}}', "is not a calibration"),
        ('{"format": 99}', "has format 99 and not 3"),
    ],
)
def test_a_file_that_is_no_calibration_is_one_line(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(content)
    with pytest.raises(ParlayError, match=said):
        load(path)


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("machine", {"vector_bandwidth": 0}),
        ("machine", {"bandwidth": 1e-320}),
        ("machine", {"rate": float("nan")}),
        ("machine", {"threads": 1e-320}),
        ("provenance", {"memory_bytes": None}),
        ("provenance", {"kv_bytes": "two"}),
        ("provenance", {"threads": float("inf")}),
        ("samples", None),
    ],
)
def test_a_calibration_with_numbers_that_no_machine_has_is_one_line(
    tmp_path: Path, part: str, changes: dict[str, object] | None
) -> None:
    path, work = tmp_path / "calibration.json", ForwardShape(rows=2)
    MachineCalibration(MACHINE, {"kv_bytes": 2}, (TimedForward(TINY, work, 1e-3),)).save(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, part: {**content[part], **changes} if changes is not None else []}))
    with pytest.raises(ParlayError, match="is not a calibration"):
        load(path)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ParlayError, match="can't read the calibration"):
        load(tmp_path / "nothing.json")


def test_the_error_that_is_told_is_that_of_the_fit() -> None:
    samples = [
        TimedForward(TINY, ForwardShape(rows=rows), MACHINE.forward(TINY, ForwardShape(rows=rows)) / 1.1)
        for rows in (1, 2, 3)
    ]
    assert MachineCalibration(MACHINE, {}, tuple(samples)).median_error == pytest.approx(0.1)
