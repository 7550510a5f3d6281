"""README's snippets run as they stand, on the built-in model in place of one that would have to be downloaded."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from parlay.cli import main
from parlay.models.fetch.resolving import resolve

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SNIPPETS = dict(re.findall(r"<!-- snippet: (\w+) -->\n```\w+\n(.*?)```", README, re.DOTALL))
HUB_ID = "Qwen/Qwen3-0.6B"


def test_the_snippets_are_short() -> None:
    assert set(SNIPPETS) == {"cli", "llm", "transformers", "server"}
    assert all(len(snippet.strip().splitlines()) <= 6 for snippet in SNIPPETS.values())


def test_the_commands_run(capsys: pytest.CaptureFixture[str]) -> None:
    for line in SNIPPETS["cli"].replace(HUB_ID, "parlay-mini").strip().splitlines():
        program, *arguments = shlex.split(line)
        assert program == "parlay"
        assert main(arguments) == 0
        assert capsys.readouterr().out.strip()


def test_the_python_api_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(SNIPPETS["llm"].replace(HUB_ID, "parlay-mini"), "README llm", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_custom_generate_runs() -> None:
    names: dict[str, object] = {}
    code = SNIPPETS["transformers"].replace(HUB_ID, str(resolve("parlay-mini")))
    exec(compile(code, "README transformers", "exec"), names)
    assert names["ids"].shape[1] > 8  # type: ignore[attr-defined]


def test_the_first_screen_holds_a_picture_and_three_commands_and_then_comes_the_comparison() -> None:
    top = "\n".join(README.splitlines()[:12])
    assert "](docs/pictures/race.svg)" in top
    assert all(command in top for command in ("make demo", "parlay chat", "parlay serve"))
    assert "| you use |" in "\n".join(README.splitlines()[:20])


def test_it_takes_a_minute() -> None:
    assert len(README.splitlines()) <= 120


def test_no_placeholder_is_left() -> None:
    assert not re.search(r"DEMO_OUTPUT|README_TABLE|FIGURES\n|NUMBER M|TBD|TODO", README)
