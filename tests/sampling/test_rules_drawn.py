"""What every rule that compares distributions also owes: refusals, exact match of greedy requests, its own noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from parlay.sampling import noise
from parlay.sampling.distributions import distribution, pick, soft_distribution
from parlay.sampling.noise import Purpose
from parlay.sampling.rules import SharedNoise
from parlay.sampling.rules.block import BlockVerification
from parlay.sampling.rules.distribution_rule import DistributionRule
from parlay.sampling.rules.k_seq import KSeq
from parlay.sampling.rules.lossy import Threshold, Typical
from parlay.sampling.rules.rejection import Rejection, WithoutReplacement
from parlay.testing.reference import ReferenceText
from parlay.types import NO_DRAFT, Draft, Exactness, Fault, NoiseKey, SamplingParams, Tree, Verdict, trees

MakeView = Callable[..., ReferenceText]

V = 4
DRAWN: list[DistributionRule] = [Rejection(), WithoutReplacement(), KSeq(), BlockVerification()]
ALL: list[DistributionRule] = [*DRAWN, Typical(), Threshold()]
named = pytest.mark.parametrize("rule", ALL, ids=lambda rule: type(rule).__name__)
drawn = pytest.mark.parametrize("rule", DRAWN, ids=lambda rule: type(rule).__name__)


def chain(rule: DistributionRule, tokens: list[int]) -> Draft:
    """A draft that the rule takes, drawn from uniform distributions."""
    (one_distribution,) = rule.kinds
    probs = None if one_distribution == "point" else torch.full((len(tokens), V), 1 / V, dtype=torch.float64)
    return replace(trees.chain(tokens, "test"), kind=one_distribution, probs=probs)


def saying(*tokens: int) -> torch.Tensor:
    """Rows of logits, each sure of its token."""
    return 50.0 * torch.eye(V)[list(tokens)]


@named
def test_drafts_of_another_distribution_are_refused_by_rule_and_distribution(
    rule: DistributionRule, view: MakeView
) -> None:
    other = "iid" if rule.kinds == {"point"} else "point"
    draft = replace(chain(rule, [1]), kind=other)
    with pytest.raises(ValueError, match=f"{type(rule).__name__} can't judge drafts of kind '{other}'"):
        rule.accept([view(SamplingParams())], [draft], torch.zeros(2, V), [0])


@drawn
def test_a_drawn_draft_must_tell_its_distributions(rule: DistributionRule, view: MakeView) -> None:
    draft = replace(chain(rule, [1]), probs=None)
    with pytest.raises(ValueError, match="needs the distribution that each node was drawn from"):
        rule.accept([view(SamplingParams())], [draft], torch.zeros(2, V), [0])


def test_block_verification_refuses_branches(view: MakeView) -> None:
    draft = replace(chain(BlockVerification(), [1, 2]), tree=Tree((1, 2), (-1, -1)))
    with pytest.raises(ValueError, match="BlockVerification judges chains"):
        BlockVerification().accept([view(SamplingParams())], [draft], torch.zeros(3, V), [0])


@named
def test_an_empty_draft_gives_one_token(rule: DistributionRule, view: MakeView) -> None:
    for temperature in (0, 1):
        params = SamplingParams(temperature=temperature)
        assert rule.accept([view(params)], [NO_DRAFT], saying(2), [0]) == [Verdict((), (2,))]


@drawn
def test_greedy_requests_are_matched_exactly(rule: DistributionRule, view: MakeView) -> None:
    """In one call with sampled ones, and in their order."""
    greedy, sampled = view(SamplingParams(temperature=0)), view(SamplingParams())
    logits_RV = torch.cat([saying(1, 3, 0), saying(1, 2, 3)])
    draft = chain(rule, [1, 2])
    expected = [Verdict((0,), (1, 3)), Verdict((0, 1), (1, 2, 3))]
    assert rule.accept([greedy, sampled], [draft, draft], logits_RV, [0, 3]) == expected
    assert rule.accept([sampled, greedy], [draft, draft], logits_RV, [3, 0]) == expected[::-1]


@named
def test_a_fault_stays_with_its_sequence_and_what_was_accepted_above_it_stands(
    rule: DistributionRule, view: MakeView
) -> None:
    logits_RV = torch.cat([saying(1, 1), saying(1, 1)])
    logits_RV[[0, 3]] = torch.nan
    text = view(SamplingParams())
    at_root, below = rule.accept([text, text], [chain(rule, [1])] * 2, logits_RV, [0, 2])
    assert isinstance(at_root, Fault)
    assert "NaN" in at_root.reason
    assert below == Verdict((), (1,))


@named
def test_probes_are_never_accepted(rule: DistributionRule, view: MakeView) -> None:
    draft = replace(chain(rule, [1, 1]), probes=1)
    assert rule.accept([view(SamplingParams())], [draft], saying(1, 1, 1), [0]) == [Verdict((0,), (1, 1))]


@named
def test_distributions_are_processed_on_each_nodes_own_path(rule: DistributionRule, view: MakeView) -> None:
    """A mask forbids the logits' favourite; a processor that hangs on the path turns it by one at each token."""

    def rotate(ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
        return logits_V.roll(len(ids))

    params = SamplingParams(logits_processors=[rotate])
    assert rule.accept([view(params)], [chain(rule, [1, 2])], saying(0, 0, 0), [0]) == [Verdict((0, 1), (1, 2, 3))]
    masked = SamplingParams(allowed_token_ids=[3])
    assert rule.accept([view(masked)], [chain(rule, [3])], saying(0, 0), [0]) == [Verdict((0,), (3, 3))]


@drawn
def test_a_verdict_is_a_function_of_seed_and_step(rule: DistributionRule, view: MakeView) -> None:
    logits_RV = torch.randn(3, V, generator=torch.Generator().manual_seed(1))
    verdicts = {}
    for seed in range(60):
        text = view(SamplingParams(), output=[1], seed=seed)
        verdicts[seed] = rule.accept([text], [chain(rule, [1, 2])], logits_RV, [0])
        assert rule.accept([text], [chain(rule, [1, 2])], logits_RV, [0]) == verdicts[seed]
    assert len({str(verdict) for verdict in verdicts.values()}) > 4


@drawn
def test_the_shared_noise_has_no_part_in_it(rule: DistributionRule, view: MakeView) -> None:
    """Tokens drawn where nothing was drafted agree with plain decoding's no more often than chance has them agree."""
    logits_RV = torch.zeros(1, V)
    texts = [view(SamplingParams(), seed=seed) for seed in range(800)]
    drawn_here = rule.accept(texts, [NO_DRAFT] * 800, logits_RV, [0] * 800)
    plain = SharedNoise().accept(texts, [NO_DRAFT] * 800, logits_RV, [0] * 800)
    assert 140 < sum(one == other for one, other in zip(drawn_here, plain, strict=True)) < 260


@pytest.mark.parametrize("purpose", list(Purpose)[1:])
def test_streams_differ_by_purpose_step_and_draw(purpose: Purpose) -> None:
    key = NoiseKey(5)
    states = {noise.stream(key, 9, purpose, step, draw) for step in range(5) for draw in range(5)}
    assert len(states) == 25
    assert not states & {noise.stream(key, 9, other, 1, 1) for other in Purpose if other is not purpose}


@pytest.mark.parametrize(
    ("key", "parts", "state", "value"),
    [
        (NoiseKey(42), (17, Purpose.DRAFT, 15, 0), 0xB33F6AEBA7B73EBF, 0.7297774863448007),
        (NoiseKey(42), (17, Purpose.COIN, 15, 2), 0xC555FFD552E73AA4, 0.7765084002936201),
        (NoiseKey(42, 1), (17, Purpose.RESIDUAL, 15), 0x371D61691D75C1DA, 0.7170751660932769),
    ],
)
def test_coins_never_change(key: NoiseKey, parts: tuple[int, ...], state: int, value: float) -> None:
    assert noise.stream(key, *parts) == state
    assert noise.uniform_of(state) == value == noise.uniform(noise.bits([state], torch.tensor([0])))[0].item()


def test_a_distribution_is_the_softmax_of_what_the_processors_leave(view: MakeView) -> None:
    params = SamplingParams(temperature=2, top_k=2)
    probs_V = distribution(torch.tensor([0.0, 2.0, 4.0, 1.0]), view(params), ())
    assert probs_V.tolist() == pytest.approx([0, 1 / (1 + torch.e), torch.e / (1 + torch.e), 0])
    assert probs_V.dtype == torch.float64
    greedy = view(SamplingParams(temperature=0, allowed_token_ids=[1, 3]))
    assert distribution(torch.tensor([9.0, 2.0, 9.0, 1.0]), greedy, ()).tolist() == [0, 1, 0, 0]
    assert soft_distribution(torch.tensor([9.0, 2.0, 9.0, 2.0]), greedy, ()).tolist() == [0, 0.5, 0, 0.5]


def test_picking_never_takes_what_has_no_weight() -> None:
    weights = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0], dtype=torch.float64).numpy()
    assert [pick(weights, share) for share in (1e-16, 0.2499, 0.2501, 1 - 2**-53)] == [1, 1, 3, 3]


def test_exactness_is_what_the_rule_promises() -> None:
    assert {rule.exactness for rule in DRAWN} == {Exactness.DISTRIBUTION}
    assert {Typical().exactness, Threshold().exactness} == {Exactness.LOSSY}
