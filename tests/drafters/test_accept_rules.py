"""Accept rules by name: which strategies they go with, how their parameters are written, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.router.policies import Fixed
from parlay.sampling.rules import SharedNoise
from parlay.sampling.rules.lossy import Threshold, Typical
from parlay.sampling.rules.rejection import Rejection
from parlay.strategies.accept_rules import DRAWN, GUESSED, RULES, STEP, UNVERIFIED
from parlay.strategies.building import build_rule
from parlay.strategies.built import StrategyCache
from parlay.strategies.catalogue import catalogue
from parlay.strategies.spelling import parse
from parlay.testing.conformance import catalogue_specs, subject_of
from parlay.testing.conformance.stage import Steady
from parlay.types import Exactness


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_what_its_entry_says(name: str) -> None:
    takers = [entry for entry in catalogue().values() if entry.factory and name in entry.parameters["rule"].choices]
    strategy = takers[0].name
    rule = build_rule(parse(f"{strategy}:rule={name}"))
    assert rule.kinds == {RULES[name].kind}
    assert rule.exactness is RULES[name].exactness
    assert RULES[name].summary.endswith(".")


def test_every_strategy_that_drafts_takes_the_rules_for_fixed_guesses_or_says_which() -> None:
    for name, entry in catalogue().items():
        if entry.factory:
            choices = entry.parameters["rule"].choices
            assert choices[0] == entry.parameters["rule"].default
            assert set(choices) >= set(GUESSED) or set(choices) <= set(DRAWN), name
    assert GUESSED[0] == "shared-noise"
    assert {*DRAWN, *GUESSED, STEP.name, UNVERIFIED.name} == set(RULES)


def test_every_rule_has_a_toy() -> None:
    promised = {subject_of(spec).rule().__class__.__name__ for spec in catalogue_specs()}
    assert promised >= {entry.factory.partition(":")[2] for entry in RULES.values()}


def test_parameters_of_rules() -> None:
    assert build_rule(parse("prompt-lookup:rule=typical,typical.eps=0.2")) == Typical(eps=0.2, delta=0.3)
    assert build_rule(parse("prompt-lookup:rule=threshold,threshold.beta=2,threshold.tau=1")) == Threshold(2, 1.0)
    assert build_rule(parse("prompt-lookup")) == build_rule(parse("none")) == SharedNoise()
    assert build_rule(parse("draft-model:rule=rejection")) == Rejection()
    text = "prompt-lookup:rule=typical,typical.eps=0.2"
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prompt-lookup:rule=rejection", ["rule=rejection", "'iid'", "prompt-lookup does not draw", "typical"]),
        ("union:rule=without-replacement", ["'without replacement'", "union does not draw"]),
        ("prompt-lookup:rule=tipical", ["rule=tipical", "choose one of shared-noise"]),
        ("none:rule=typical", ["no parameter 'rule'"]),
        ("prompt-lookup:typical.eps=0.2", ["typical.eps", "rule=typical", "not asked for"]),
        ("prompt-lookup:rule=threshold,typical.eps=0.2", ["typical.eps", "not asked for"]),
        ("prompt-lookup:rule=typical,typical.eps=2", ["at most 1"]),
        ("prompt-lookup:rule=threshold,threshold.beta=0", ["at least 1"]),
        ("union:of=draft-model(rule=rejection)+prompt-lookup", ["rule", "whole strategy"]),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_strategy_has_the_exactness_of_its_rule_and_rules_are_shared() -> None:
    """One rule judges all its sequences in one call, whatever drafts for them."""
    book = StrategyCache(Resources(8, lambda name: pytest.fail("opened")), Steady())
    typical = book.get("prompt-lookup:rule=typical,policy=fixed")
    assert typical.rule.exactness is Exactness.LOSSY
    assert isinstance(typical.policy, Fixed)
    assert typical.name == "prompt-lookup:policy=fixed,rule=typical"
    assert typical.rule is book.get("prompt-lookup:rule=typical,k=3").rule
    assert typical.rule is not book.get("prompt-lookup:rule=typical,typical.eps=0.5").rule
    assert book.get("none").rule is book.get("prompt-lookup").rule


def test_the_factory_of_every_rule_names_a_module() -> None:
    from parlay.sampling import rules

    folder = Path(rules.__file__).parent
    assert {entry.factory.partition(":")[0] for entry in RULES.values()} <= {path.stem for path in folder.iterdir()}
