"""`parlay strategies` prints the catalogue."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from parlay.strategies.accept_rules import RULES
from parlay.strategies.catalogue import catalogue
from parlay.strategies.entry import DEFAULT_STRATEGY
from tests.cli.conftest import Cli

EXAMPLE = Path(__file__).parents[2] / "examples" / "rules" / "my_rules.py"


def test_people_see_every_strategy_and_what_it_promises(cli: Cli) -> None:
    result = cli("strategies")
    assert result.code == 0
    assert all(f"\n  {name} " in f"\n{result.out}" for name in [*catalogue(), *RULES])
    assert all(len(line) <= 80 for line in result.out.splitlines())
    assert result.out.splitlines()[1].split()[0] == DEFAULT_STRATEGY, "who only wants speed may stop reading here"


def test_people_see_all_parameters_of_what_they_name(cli: Cli) -> None:
    for name, entry in catalogue().items():
        out = cli("strategies", name).out
        assert out.startswith(f"{name}\n")
        assert all(f"    {parameter} " in out for parameter in entry.parameters if "." not in parameter)
    assert "rejection\n" in cli("strategies", "jacobi", "rejection").out


def test_people_see_what_a_rule_or_drafter_of_their_own_promises(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(EXAMPLE, tmp_path / "own_rules.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rules", raising=False)
    out = cli("strategies", "own_rules:Nucleus").out
    assert out.startswith("own_rules:Nucleus\n")
    assert "exactness lossy; drafts: point" in out


def test_a_name_that_is_none_is_one_line_that_says_which_is_near(cli: Cli) -> None:
    result = cli("strategies", "lookhaead")
    assert result.code == 2
    assert "lookahead" in result.err
    assert result.err.count("\n") == 1


def test_a_name_with_parameters_is_one_line_that_names_the_strategy_alone(cli: Cli) -> None:
    """`--strategy` takes parameters behind a colon, this command lists them."""
    for words in (["prompt-lookup:k=8"], ["--json", "prompt-lookup:k=8"]):
        result = cli("strategies", *words)
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert "write parlay strategies prompt-lookup\n" in result.err


def test_json_has_every_fact_of_every_strategy(cli: Cli) -> None:
    entries = json.loads(cli("strategies", "--json").out)
    assert [entry["name"] for entry in entries] == list(catalogue())
    facts = {"name", "family", "exactness", "training", "needs", "summary", "when", "reference", "parameters"}
    assert all(set(entry) == facts for entry in entries)
