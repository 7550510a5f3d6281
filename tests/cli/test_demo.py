"""`parlay demo` fits a screen, compares texts, and says when a promise is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from parlay import demo
from tests.cli.conftest import Cli


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few tokens, and the built-in model: none has been pulled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "MAX_TOKENS", 24)
    monkeypatch.setattr(demo, "MOST_ROUNDS", 1)


def test_it_fits_a_screen_and_every_text_is_the_same(cli: Cli) -> None:
    result = cli("demo")
    lines = result.out.splitlines()
    assert result.code == 0
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if line.endswith((" yes", " NO"))]
    assert len(rows) >= 6
    assert all(line.endswith(" yes") for line in rows)
    assert "--model" in lines[-1]


def test_a_broken_promise_fails_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.Contender, "same_text", lambda self, other: False)
    result = cli("demo")
    assert result.code == 1
    assert "report it" in result.err
