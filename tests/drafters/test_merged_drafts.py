"""Several draft models draw side by side, each by its own distribution and with randomness of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.sampling.distributions import distribution
from parlay.strategies.building import build, build_rule
from parlay.strategies.spelling import parse
from parlay.types import Draft, Exactness, NoiseKey, Request, SamplingParams, trees
from tests.drafters.sight import MakeRunner

VOCAB = 12
SAMPLED = Request(id="r", prompt=(0,), params=SamplingParams(), key=NoiseKey(7))


@dataclass
class Sight:
    sequence: int
    tokens: list[int]
    request: Request = SAMPLED
    prompt_length: int = field(default=1)


def propose(runners: dict[str, Any], view: Sight, budget: int, settings: str = "min_p=0") -> Draft:
    drafter = build(
        parse(f"merged-drafts:models={'+'.join(runners)},{settings}"), Resources(VOCAB, runners.__getitem__)
    )
    assert drafter is not None
    return drafter.propose([view], [budget])[0]


def two(toy_runner: MakeRunner) -> dict[str, Any]:
    runners = {"a": toy_runner(), "b": toy_runner()}
    runners["b"].logits = lambda prefix: runners["a"].logits([*prefix, 5])
    return runners


def test_chains_stand_side_by_side_and_each_node_tells_its_own_models_distribution(toy_runner: MakeRunner) -> None:
    runners, view = two(toy_runner), Sight(0, [1, 2, 3])
    draft = propose(runners, view, 5)
    assert draft.sources == ("a", "b", "a", "b", "a")
    assert draft.tree.parents == (-1, -1, 0, 1, 2)
    assert draft.kind == "iid"
    assert draft.probs is not None
    for node, parent in enumerate(draft.tree.parents):
        path = [draft.tree.tokens[above] for above in trees.path_to(draft.tree, parent)]
        expected = distribution(runners[draft.sources[node]].logits([*view.tokens, *path]), view, path)
        torch.testing.assert_close(draft.probs[node], expected)


def test_models_draw_independently(toy_runner: MakeRunner) -> None:
    """Two models with one distribution: their draws are equal as often as chance has it, or the rule would be wrong."""
    runners = {name: toy_runner(capacity=10**6) for name in "ab"}
    for runner in runners.values():
        runner.logits = lambda prefix: torch.zeros(VOCAB)
    drafts = [propose(runners, Sight(0, [1] * size), 2).tree.tokens for size in range(1, 301)]
    assert 8 < sum(one == other for one, other in drafts) < 50


def test_it_goes_with_the_rule_for_several_candidates_only() -> None:
    assert build_rule(parse("merged-drafts:models=a+b")).exactness is Exactness.DISTRIBUTION
    with pytest.raises(UsageError, match="choose one of multi-candidate"):
        parse("merged-drafts:models=a+b,rule=shared-noise")


@pytest.mark.parametrize("models", ["", "a", "a+a"])
def test_fewer_than_two_models_are_refused(models: str) -> None:
    with pytest.raises(UsageError, match="two or more different models"):
        build(parse(f"merged-drafts:models={models}"), Resources(VOCAB, lambda name: pytest.fail("opened")))
