"""Beside busy processes: other engines are measured like strategies, and the page says which goals are met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.busy.page import LLAMA, page
from benchmarks.busy.peers import PeerDecoder
from benchmarks.busy.plans import ENGINES, FORETOLD, PREDICTION, Lengths
from benchmarks.figures.systems import Timed
from benchmarks.peers.rounds import Entrant
from parlay.bench.provenance import provenance
from parlay.bench.records import PLAIN, Cell, Row
from parlay.bench.wave import Ask
from parlay.llm import DEFAULT_STRATEGY

SPEEDS: Mapping[tuple[str, str], Sequence[float]] = {
    (ENGINES, PLAIN): (100, 50),
    (ENGINES, LLAMA): (80, 10),
    ("prose", PLAIN): (100, 50),
    ("prose", DEFAULT_STRATEGY): (100, 45),
    ("copy", PLAIN): (100, 50),
    ("copy", DEFAULT_STRATEGY): (300, 130),
    (FORETOLD, PLAIN): (100, 50),
    (FORETOLD, PREDICTION): (500, 250),
}
"""Idle, and beside two."""


def rows() -> list[Row]:
    return [
        Row(
            cell=Cell(model="m", strategy=strategy, workload=workload, busy=busy),
            round=turn,
            requests=1,
            tokens=100,
            steps=50 if strategy == PREDICTION and busy else 20,
            decode_tokens=100,
            decode_seconds=100 / speed,
        )
        for (workload, strategy), speeds in SPEEDS.items()
        for busy, speed in zip((0, 2), speeds, strict=True)
        for turn in range(2)
    ]


@pytest.fixture(scope="module")
def text() -> str:
    failed = Row(cell=Cell(model="m", strategy="transformers", workload=ENGINES, busy=2), error="no | such place")
    return page(provenance("python -m benchmarks.busy"), [*rows(), failed])


def test_a_share_is_that_of_the_same_engines_idle_speed(text: str) -> None:
    assert "| parlay none | 100.0 | 50.0, 0.50 (0.50-0.50) |" in text
    assert f"| {LLAMA} | 80.0 | 10.0, 0.12 (0.12-0.12) |" in text


@pytest.mark.parametrize(
    "line",
    [
        "met: `none` keeps 0.50 (0.50-0.50) of its idle speed beside 2; 0.45 is wanted on two cores",
        "met: `none` has 5.00 (5.00-5.00) times llama.cpp's speed beside 2; 3 is wanted",
        f"**not met**: `{DEFAULT_STRATEGY}` on prose beside 2: 0.90 (0.90-0.90) times `none`; 0.95 is wanted",
        f"met: `{DEFAULT_STRATEGY}` on copy beside 2: 2.60 (2.60-2.60) times `none`; 2.40 is wanted",
        "**not met**: right predictions beside 2: 2.00 tokens per step, idle 5.00",
        "| transformers | no / such place |",
    ],
)
def test_goals_and_failures_are_said_in_a_line_each(text: str, line: str) -> None:
    assert line in text


def test_a_peer_is_timed_as_its_own_stopwatch_tells() -> None:
    entrant = Entrant("peer", "plain", "peer", lambda ids, most: Timed((7,) * most, 1, 0.5, 2.0, steps=most))
    wave = PeerDecoder(entrant).decode("peer", [Ask(ids=(1, 2), most=9, seed=0)], 0.0)
    (answer,) = wave.answers
    assert (answer.tokens, answer.metrics.steps, answer.between_seconds) == ((7,) * 9, 9, 0.25)
    assert (wave.decode_tokens, wave.decode_seconds, wave.seconds) == (8, 2.0, 2.5)


def test_answers_are_longer_on_faster_models_within_bounds() -> None:
    slow, usual, fast = (Lengths.of(speed) for speed in (1, 300, 10_000))
    assert (slow, fast) == (Lengths(16, 64), Lengths(256, 160))
    assert slow.engines < usual.engines < fast.engines


def test_the_command_in_the_results_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    from benchmarks.busy.__main__ import command, parse

    options = parse(["--quick", "--model", str(tmp_path / "some" / "model")])
    assert command(options) == "python -m benchmarks.busy --venvs DIR --model model --quick"
