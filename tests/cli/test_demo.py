"""`parlay demo` fits a screen, compares texts, and says when a promise is broken."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from parlay.bench.records import Cell, Row
from parlay.bench.wave import Prepared
from parlay.cli import race as demo
from parlay.models.fetch import pulled
from tests.cli.conftest import Cli


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few tokens, and the built-in model: none has been pulled, and pip is no program that brings one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(pulled, "PIP", ["false"])
    monkeypatch.setattr(demo, "LENGTHS", ((0.0, 24),))
    monkeypatch.setattr(demo, "MOST_ROUNDS", 1)


def test_it_fits_a_screen_and_every_text_is_the_same(cli: Cli) -> None:
    result = cli("demo")
    lines = result.out.splitlines()
    assert result.code == 0
    assert re.fullmatch(r"[\w-]+ on \w+, \d+ CPU threads", lines[0]), "a GGUF file has no dtype"
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if line.endswith((" yes", " NO"))]
    assert len(rows) >= 6
    assert all(line.endswith(" yes") for line in rows)
    assert "--model" in lines[-1]
    assert "parlay pull smollm2-135m" in result.err, "what could not be had is said"
    assert "not run" not in result.out


def test_a_broken_promise_fails_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.Race, "same_text", property(lambda race: False))
    result = cli("demo")
    assert result.code == 1
    assert "report it" in result.err


class Scripted:
    """Rounds whose ratios are given; the last one comes again and again."""

    def __init__(self, *ratios: float) -> None:
        self.ratios = ratios

    def measure(self, cells: Sequence[Cell], prepared: Prepared, number: int) -> list[Row]:
        ratio = self.ratios[min(number, len(self.ratios) - 1)]
        return [
            Row(cell=cell, round=number, requests=1, tokens=9, decode_tokens=8, decode_seconds=seconds)
            for cell, seconds in zip(cells, (1.0, 1.0 / ratio), strict=True)
        ]


def race(*ratios: float, seconds: float = 60.0) -> demo.Race:
    stage = demo.DemoPart(None, Scripted(*ratios), 8)  # type: ignore[arg-type]
    return stage.race(Prepared((), (), None, ""), "prompt-lookup", seconds)


@pytest.fixture
def unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MOST_ROUNDS", 15)


@pytest.mark.usefixtures("unbounded")
def test_rounds_that_differ_are_repeated_and_the_median_counts() -> None:
    alike, different = race(2.0), race(2.0, 4.0, 1.0, 2.0)
    assert len(alike.fast) == len(alike.plain) == demo.FEWEST_ROUNDS
    assert len(different.fast) > demo.FEWEST_ROUNDS
    assert different.summary.ratio is not None
    assert different.summary.ratio.median == 2.0


@pytest.mark.usefixtures("unbounded")
def test_when_the_time_is_up_no_round_begins() -> None:
    assert len(race(1.0, 5.0, 2.0, seconds=-1.0).fast) == 1


@pytest.mark.parametrize(("cores", "said"), [(0.1, False), (1.9, True)])
def test_a_busy_machine_is_named_in_a_line(cli: Cli, monkeypatch: pytest.MonkeyPatch, cores: float, said: bool) -> None:
    monkeypatch.setattr(demo, "busy_cores", lambda: cores)
    monkeypatch.setattr(demo, "SLOW_LINES", 0)
    lines = cli("demo").out.splitlines()
    assert (lines[1] == "Other processes keep 1.9 cores busy: speeds are too low, and ratios less sure.") == said
