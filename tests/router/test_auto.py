"""The strategy ``auto``: what it chooses from, and texts that do not depend on it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.router.goals import EFFORTS
from parlay.strategies.built import StrategyCache
from parlay.strategies.candidates import as_arm, candidates
from parlay.strategies.catalogue import catalogue
from parlay.strategies.spelling import all_with_effort, parse, with_effort
from parlay.testing.conformance.stage import PLAIN, StageRequest, Steady, decode
from parlay.testing.conformance.stages import toy_stage
from parlay.testing.conformance.universal import CAPACITY, agree
from parlay.types import NOTHING_NEEDED, PowerModel, SamplingParams

STAGE = toy_stage("toy")
BARE = Resources(vocab_size=STAGE.vocab_size, open_runner=STAGE.resources.open_runner)
"""A target for which nothing was made."""


def names(spec: str, resources: Resources) -> list[str]:
    return [arm.name for arm in candidates(parse(spec), resources)]


def test_it_chooses_from_what_exists_for_the_target() -> None:
    predicting, *bare = names("auto", BARE)
    assert catalogue()[predicting].predicts, "for requests with a prediction"
    assert [catalogue()[name].family for name in bare] == ["store"], "it finds what any copying drafter finds"
    assert all(catalogue()[name].replayable for name in bare)
    assert names("auto", STAGE.resources)[1:] != bare, "a draft model and heads exist there"
    families = [catalogue()[name].family for name in names("auto", STAGE.resources)]
    assert sorted(families) == ["copy", "heads", "self", "store"], "of each the best, but no draft model beside a head"
    without = names("auto", replace(STAGE.resources, find_head=None))
    assert sorted(catalogue()[name].family for name in without) == ["copy", "model", "self", "store"]
    assert "draft-model" in without
    spare = names("auto", replace(STAGE.resources, find_head=None, spare_threads=1))
    assert "parallel-draft" in spare, "it may draft on a thread of its own, and otherwise does what draft-model does"
    assert "draft-model" not in spare, "two drafters on one model would read each prompt twice"
    assert STAGE.resources.target is not None
    causal = replace(STAGE.resources, target=replace(STAGE.resources.target, canvas=None))
    assert "set-block" in names("auto", STAGE.resources), "the target fills masked places"
    assert "set-block" not in names("auto", causal)


def test_heads_for_a_kind_of_requests_are_arms_beside_the_general_one() -> None:
    with_domains = replace(STAGE.resources, domains=lambda: ("code", "law"))
    special = set(names_in_full("auto", with_domains)) - set(names_in_full("auto", STAGE.resources))
    (name,) = special
    assert name.endswith(":head=code"), "nothing tells that a request is about law"
    (arm,) = [as_arm(each, NOTHING_NEEDED) for each in candidates(parse("auto"), with_domains) if str(each) == name]
    assert arm.suits("code")
    assert not arm.suits("prose")


def names_in_full(spec: str, resources: Resources) -> list[str]:
    return [str(arm) for arm in candidates(parse(spec), resources)]


def test_it_chooses_from_what_is_named() -> None:
    named = "trie-lookahead+prompt-lookup(min_ngram=2)"
    assert names(f"auto:of={named}", STAGE.resources) == ["trie-lookahead", "prompt-lookup"]


def test_its_effort_sets_how_much_drafters_draft_but_where_that_is_named() -> None:
    usual, named = parse("suffix-decoding"), parse("suffix-decoding:k=6")
    low, medium, high = (as_arm(usual, NOTHING_NEEDED, effort.size).most for effort in EFFORTS.values())
    assert low < medium < high
    assert as_arm(named, NOTHING_NEEDED, EFFORTS["high"].size).most == 6


def test_the_flag_is_the_parameter() -> None:
    assert str(with_effort(parse("auto:goal=latency"), "high")) == "auto:effort=high,goal=latency"
    assert all_with_effort(["none", "auto"], "low") == ("none", "auto:effort=low")


def test_a_goal_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="strategy auto: goal=speed: choose one of throughput, latency, energy"):
        parse("auto:goal=speed")


@pytest.mark.parametrize("inner", ["none", "auto"])
def test_what_has_no_drafter_of_its_own_is_refused(inner: str) -> None:
    with pytest.raises(UsageError, match=f"auto: {inner} has no drafter of its own; remove it"):
        candidates(parse(f"auto:of=prompt-lookup+{inner}"), BARE)


def test_one_that_is_named_twice_is_refused() -> None:
    """It would be opened twice, and learned of by halves."""
    with pytest.raises(UsageError, match="names a drafter twice; remove one of them"):
        candidates(parse("auto:of=prompt-lookup+suffix-decoding+prompt-lookup"), BARE)
    settings = "auto:of=prompt-lookup+prompt-lookup(k=3)"
    assert len(candidates(parse(settings), BARE)) == 2, "another budget is another arm"


def test_one_that_is_named_and_can_not_be_had_is_refused() -> None:
    with pytest.raises(UsageError, match="no draft model"):
        StrategyCache(BARE, Steady()).get("auto:of=prompt-lookup+draft-model")


@pytest.mark.parametrize("spec", ["auto:goal=energy", "auto:power=60"])
def test_joules_and_watts_are_refused_where_nobody_knows_what_is_drawn(spec: str) -> None:
    with pytest.raises(UsageError, match="remove goal=energy and power"):
        StrategyCache(BARE, Steady()).get(spec)


def test_what_is_drawn_is_asked_once_and_told_with_each_request() -> None:
    asked: list[PowerModel] = []

    def power() -> PowerModel:
        asked.append(PowerModel(50.0, 0.1, "modelled from a guess"))
        return asked[-1]

    strategies = StrategyCache(BARE, Steady(), power=power)
    strategies.get("auto")
    assert not asked
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    for spec in ("auto:goal=energy", "auto:power=80,goal=energy"):
        request = StageRequest((1, 2, 3) * 8, params)
        (sample,) = decode(STAGE.open_runner(CAPACITY), [(request, strategies.get(spec))], None)
        assert sample.metrics.router is not None
        assert sample.metrics.router.power == "50 W and 100 mJ a row, modelled from a guess"
    assert len(asked) == 1


def test_where_what_is_drawn_is_not_known_no_drafter_is_built() -> None:
    """Building them may take seconds, and a refused strategy is not kept: each request would take them."""
    resources = replace(BARE, open_runner=lambda name: pytest.fail(f"{name} was opened"))
    with pytest.raises(UsageError, match="remove goal=energy"):
        StrategyCache(resources, Steady()).get("auto:of=draft-model(model=toy),goal=energy")


def test_one_that_chooses_from_a_single_drafter_drafts() -> None:
    auto = StrategyCache(BARE, Steady()).get("auto")
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    (sample,) = decode(STAGE.open_runner(CAPACITY), [(StageRequest((1, 2, 3) * 8, params), auto)], None)
    assert sample.metrics.accepted_tokens > 0


@pytest.mark.parametrize("spec", ["auto", "auto:goal=latency", "auto:effort=high", "auto:goal=energy,power=60"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_plain_decoding_whatever_it_chooses(temperature: float, spec: str) -> None:
    """Requests of several strategies in one batch; the second round meets a router that has learned."""
    power = PowerModel(50.0, 1.0, "measured: as the test says")
    strategies = StrategyCache(replace(STAGE.resources), Steady(), power=lambda: power)
    auto = strategies.get(spec)
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
    prompt = tuple(STAGE.expected(StageRequest((1, 2, 3), params)).tokens)
    for _ in range(2):
        jobs = [(StageRequest(prompt[: 20 + seed], params, seed=seed), auto) for seed in range(5)]
        plain = (StageRequest(prompt[:9], params, seed=9), PLAIN.strategy(STAGE, 0))
        assert agree(STAGE, [*jobs, plain]) == []
