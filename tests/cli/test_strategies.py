"""`parlay strategies` prints the catalogue."""

import json

from parlay.drafters.catalogue import catalogue
from tests.cli.conftest import Cli


def test_people_see_every_strategy_and_what_it_promises(cli: Cli) -> None:
    result = cli("strategies")
    assert result.code == 0
    assert all(f"\n{name}\n" in f"\n{result.out}" for name in catalogue())
    assert all(len(line) <= 80 for line in result.out.splitlines())


def test_json_has_every_fact_of_every_strategy(cli: Cli) -> None:
    entries = json.loads(cli("strategies", "--json").out)
    assert [entry["name"] for entry in entries] == list(catalogue())
    facts = {"name", "family", "exactness", "training", "needs", "summary", "reference", "parameters"}
    assert all(set(entry) == facts for entry in entries)
