"""The lossy rules accept what their papers say, on distributions small enough to work out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from parlay.sampling.rules.lossy import Rollback, Step, Threshold, Typical, entropy
from parlay.testing.reference import ReferenceText
from parlay.types import Draft, Fault, SamplingParams, Tree, Verdict, trees

MakeView = Callable[..., ReferenceText]


def rows(*distributions: list[float]) -> torch.Tensor:
    return torch.tensor(distributions).log()


def path(verdict: Verdict | Fault) -> tuple[int, ...]:
    assert isinstance(verdict, Verdict)
    return verdict.path


@pytest.mark.parametrize(
    ("distribution", "passes"),
    [
        ([0.92, 0.08], False),  # entropy .279: the floor is min(.09, .3 * .757) = .09
        ([0.90, 0.10], True),
        ([0.5, 0.5], True),
    ],
)
def test_typical_acceptance_by_hand_on_two_tokens(distribution: list[float], passes: bool, view: MakeView) -> None:
    (verdict,) = Typical().accept(
        [view(SamplingParams())], [trees.chain([1], "x")], rows(distribution, distribution), [0]
    )
    assert (path(verdict) == (0,)) == passes


def test_typical_acceptance_asks_less_where_the_target_is_undecided(view: MakeView) -> None:
    """Of 100 equal tokens none has probability .09; the floor is .3 exp(-H) = .003."""
    distribution = [0.01] * 100
    assert entropy(torch.tensor(distribution).double().numpy()) == pytest.approx(math.log(100), abs=1e-6)
    (verdict,) = Typical().accept(
        [view(SamplingParams())], [trees.chain([7], "x")], rows(distribution, distribution), [0]
    )
    assert path(verdict) == (0,)
    (verdict,) = Typical(delta=1.0).accept(
        [view(SamplingParams())], [trees.chain([7], "x")], rows(distribution, distribution), [0]
    )
    assert path(verdict) == ()


def test_the_longest_path_wins_and_of_equals_the_likeliest(view: MakeView) -> None:
    draft = Draft(Tree((0, 1, 2, 0, 1), (-1, -1, 1, 1, 0)), sources=("x",) * 5)
    root, after = [0.5, 0.3, 0.2], [0.3, 0.2, 0.5]
    logits_RV = rows(root, after, after, after, after, after)
    (verdict,) = Typical().accept([view(SamplingParams())], [draft], logits_RV, [0])
    assert path(verdict) == (1, 2)  # .3 * .5, before .3 * .3 and .5 * .2
    assert isinstance(verdict, Verdict)
    assert verdict.sampled[:2] == (1, 2)


def test_typical_acceptance_of_greedy_requests_is_exact_match(view: MakeView) -> None:
    greedy = view(SamplingParams(temperature=0))
    distribution = [0.6, 0.4]
    (verdict,) = Typical().accept([greedy], [trees.chain([1], "x")], rows(distribution, distribution), [0])
    assert verdict == Verdict((), (0,))


@pytest.mark.parametrize(
    ("beta", "tau", "accepted"),
    [(1, 3.0, set()), (2, 3.0, {1}), (5, 3.0, {1, 2}), (5, 0.5, {1}), (2, math.inf, {1}), (99, 9.0, {1, 2, 3})],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_threshold_acceptance_is_by_rank_and_distance(
    beta: int, tau: float, accepted: set[int], temperature: float, view: MakeView
) -> None:
    """Greedy requests, too: the rule was made for them. Their last token is the best one."""
    logits_RV = torch.tensor([[5.0, 4.6, 3.0, 0.0]] * 2)
    for token in (1, 2, 3):
        text = view(SamplingParams(temperature=temperature))
        (verdict,) = Threshold(beta, tau).accept([text], [trees.chain([token], "x")], logits_RV, [0])
        assert (path(verdict) == (0,)) == (token in accepted)
        assert isinstance(verdict, Verdict)
        assert temperature or verdict.sampled[-1] == 0


def test_the_best_token_of_ties_is_the_lowest(view: MakeView) -> None:
    greedy = view(SamplingParams(temperature=0))
    logits_RV = torch.zeros(2, 4)
    for token in range(4):
        (verdict,) = Threshold(beta=1).accept([greedy], [trees.chain([token], "x")], logits_RV, [0])
        assert (path(verdict) == (0,)) == (token == 0)


@pytest.mark.parametrize(
    ("chances", "nats", "whole"),
    [
        ([0.4, 0.4, 0.4], 0.92, True),  # .916 a token
        ([0.4, 0.4, 0.4], 0.91, False),
        ([0.9, 0.01, 0.9], 1.61, True),  # 1.605: a step is judged in the mean
        ([0.9, 0.01, 0.9], 1.60, False),
        ([0.9, 0.0, 0.9], 99.0, False),  # ruled out by the request
    ],
)
def test_a_step_is_accepted_whole_by_its_mean_or_rewritten(
    chances: list[float], nats: float, whole: bool, view: MakeView
) -> None:
    """Token 0 is the drafted one; where it is not the best one, the target's own is token 1."""
    laws = [[chance, 1 - chance] for chance in chances]
    draft = trees.chain([0, 0, 0], "x")
    (verdict,) = Step(nats=nats).accept([view(SamplingParams(temperature=0))], [draft], rows(*laws, [0.2, 0.8]), [0])
    exact = next((place for place, chance in enumerate(chances) if chance < 0.5), 3)
    assert verdict == (Verdict((0, 1, 2), (0, 0, 0, 1)) if whole else Verdict((0, 1, 2)[:exact], (0,) * exact + (1,)))


def test_a_step_of_no_surprise_allowed_is_exact_match(view: MakeView) -> None:
    sure = [1.0, 0.0]
    (verdict,) = Step(nats=0).accept(
        [view(SamplingParams(temperature=0))], [trees.chain([0, 1], "x")], rows(sure, sure, sure), [0]
    )
    assert verdict == Verdict((0,), (0, 0))


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(("nats", "accepted"), [(0, {0}), (1, {0, 1}), (2.4, {0, 1, 2}), (math.inf, {0, 1, 2, 3})])
def test_rollback_is_by_the_targets_surprise(
    nats: float, accepted: set[int], temperature: float, view: MakeView
) -> None:
    """Of .69, .92, 2.35 and 5.30 nats. The best token always stays, and takes the place of one that does not."""
    distribution = [0.4999, 0.4, 0.0951, 0.005]
    logits_RV = rows(distribution, distribution)
    for token in range(4):
        text = view(SamplingParams(temperature=temperature))
        (verdict,) = Rollback(nats).accept([text], [trees.chain([token], "x")], logits_RV, [0])
        assert (path(verdict) == (0,)) == (token in accepted)
        assert isinstance(verdict, Verdict)
        assert temperature or verdict.sampled[-1] == 0
