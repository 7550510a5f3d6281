"""`parlay router` shows what was learned on this machine, and forgets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

PROMPT = "one two three one two three one two three one two"


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def generate(cli: Cli, *flags: str) -> None:
    chosen = (
        "--model",
        "parlay-mini",
        "--strategy",
        "auto:of=prompt-lookup",
        "--max-tokens",
        "32",
        "--ignore-eos",
        *flags,
    )
    assert cli("generate", PROMPT, *chosen).code == 0


def test_what_was_learned_is_shown_and_can_be_forgotten(cli: Cli) -> None:
    assert cli("router", "show").out.startswith("nothing was learned yet")
    generate(cli)
    shown = cli("router", "show").out.splitlines()
    assert shown[0].startswith("parlay-mini on ")
    assert shown[1].split()[:2] == ["drafter", "requests"]
    assert shown[2].split()[:2] == ["prompt-lookup", "all"]
    assert shown[3].split()[0] == "prose"
    assert (
        cli(
            "generate", "Once", "--model", "parlay-mini", "--strategy", "none", "--max-tokens", "48", "--ignore-eos"
        ).code
        == 0
    )
    assert " rows " in cli("router", "show").out.splitlines()[-1]
    (entry,) = json.loads(cli("router", "show", "--model", "parlay-mini", "--json").out)
    assert set(entry["arms"]) == {"prompt-lookup"}
    assert "three" not in json.dumps(entry)
    assert cli("router", "reset", "--model", "another").out == "forgot what was learned of 0 models\n"
    assert cli("router", "reset").out == "forgot what was learned of 1 model\n"
    assert json.loads(cli("router", "show", "--json").out) == []


def test_nothing_is_kept_where_that_is_switched_off(cli: Cli) -> None:
    generate(cli, "--router-memory", "off")
    assert json.loads(cli("router", "show", "--json").out) == []


def test_keys_can_not_be_apart_where_there_are_none(cli: Cli) -> None:
    result = cli("serve", "--router-memory", "per-key")
    assert result.code == 2
    assert "--router-memory per-key needs API keys: add --api-key-file" in result.err
