"""Drawn texts through the whole engine, counted against exact probabilities, under everything that could bend it:
masks, temperature, truncation, budgets that cut drafts, runners that take chains only, caches without room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parlay.engine import Limits
from parlay.router.policies import adaptive
from parlay.testing.conformance import Stage, subject_of, toy_stage
from parlay.testing.conformance.distribution import UNLIKELY, chi_square, text_distribution
from parlay.testing.conformance.stage import StageRequest, StageSample, Steady, decode
from parlay.types import Exactness, SamplingParams, Strategy

STAGE = toy_stage("toy distribution", vocab_size=5)
CHAIN_STAGE = toy_stage("toy chains", vocab_size=5, tree="chain", cut=2)
PROMPT = (1, 0, 2, 1, 0)
LENGTH = 3

RULES = {
    "rejection": "draft-model:rule=rejection,min_p=0.1",
    "block": "draft-model:rule=block,min_p=0.1",
    "k-seq": "draft-model:rule=k-seq,min_p=0.02,width=2",
    "multi-candidate": "draft-model:rule=multi-candidate,min_p=0,shape=chain,width=3",
    "without-replacement": "draft-model:rule=without-replacement,min_p=0.02,branching=2+1",
}

MASKED = SamplingParams(temperature=1.2, top_p=0.9, allowed_token_ids=(0, 1, 3))
TRUNCATED = SamplingParams(temperature=0.9, top_k=3)


def masked(stage: Stage, params: SamplingParams) -> Stage:
    """The same logits with what is not allowed taken out, for the exact distribution."""

    def logits_of(ids: Sequence[int]) -> Tensor:
        logits_V = torch.full((stage.vocab_size,), -torch.inf)
        allowed = list(params.allowed_token_ids or range(stage.vocab_size))
        logits_V[allowed] = stage.logits_of(ids)[allowed]
        return logits_V

    return replace(stage, logits_of=logits_of)


def jobs(strategy: Strategy, params: SamplingParams, count: int) -> list[tuple[StageRequest, Strategy]]:
    """One text per seed, longer than what is counted so that the first draft may be a whole tree."""
    return [(StageRequest(PROMPT, replace(params, max_tokens=LENGTH + 3), seed), strategy) for seed in range(count)]


def has_the_distribution(stage: Stage, samples: Sequence[StageSample], params: SamplingParams) -> bool:
    """Pearson's test of the first tokens."""
    expected = dict(text_distribution(masked(stage, params).logits_of, PROMPT, params, LENGTH))
    counts = Counter(tuple(sample.tokens[:LENGTH]) for sample in samples)
    assert set(counts) <= set(expected)
    return chi_square(counts, expected, len(samples)) > UNLIKELY


@pytest.mark.parametrize("rule", RULES)
def test_under_a_mask_while_drafts_are_cut_to_a_common_row_budget(rule: str) -> None:
    """Forty sequences share rows for three nodes each of the five they draft: drafts are cut in drawing order."""
    strategy = subject_of(RULES[rule]).strategy(STAGE, 6)
    limits = Limits(max_sequences=40, max_rows=400, max_draft_rows=120)
    samples = decode(STAGE.open_runner(8192), jobs(strategy, MASKED, 400), limits)
    assert has_the_distribution(STAGE, samples, MASKED)
    assert sum(sample.metrics.accepted_tokens for sample in samples) > 120
    assert samples[0].metrics.exactness is Exactness.DISTRIBUTION


@pytest.mark.parametrize("rule", ["multi-candidate", "without-replacement"])
def test_on_a_runner_that_takes_chains_only(rule: str) -> None:
    strategy = subject_of(RULES[rule]).strategy(CHAIN_STAGE, 6)
    samples = decode(CHAIN_STAGE.open_runner(8192), jobs(strategy, TRUNCATED, 400))
    assert has_the_distribution(CHAIN_STAGE, samples, TRUNCATED)
    assert sum(sample.metrics.accepted_tokens for sample in samples) > 120


def test_where_the_cache_has_no_room_for_long_drafts() -> None:
    """Whether a draft is verified hangs on its budget, not on how long what was drawn happens to be."""
    strategy = subject_of("draft-model:rule=rejection,min_p=0.3").strategy(STAGE, 4)
    samples = decode(STAGE.open_runner(300), jobs(strategy, TRUNCATED, 500))
    assert has_the_distribution(STAGE, samples, TRUNCATED)
    assert 0 < sum(sample.metrics.draft_steps for sample in samples) < sum(sample.metrics.steps for sample in samples)


def test_under_the_adaptive_policy() -> None:
    """Budgets follow what was accepted before this step, so they tell nothing of what it draws."""
    strategy = replace(subject_of(RULES["block"]).strategy(STAGE, 0), policy=adaptive(Steady(), 4))
    samples = decode(STAGE.open_runner(8192), jobs(strategy, TRUNCATED, 600))
    assert has_the_distribution(STAGE, samples, TRUNCATED)
    assert sum(sample.metrics.accepted_tokens for sample in samples) > 120


@pytest.mark.parametrize("rule", RULES)
def test_a_seed_gives_one_text_whatever_is_decoded_beside_it(rule: str) -> None:
    asks = [StageRequest(PROMPT, SamplingParams(temperature=0.9, max_tokens=20), seed) for seed in range(4)]
    together = decode(STAGE.open_runner(8192), [(ask, subject_of(RULES[rule]).strategy(STAGE, 4)) for ask in asks])
    for ask, sample in zip(asks, together, strict=True):
        (alone,) = decode(STAGE.open_runner(8192), [(ask, subject_of(RULES[rule]).strategy(STAGE, 4))])
        assert alone.tokens == sample.tokens
    assert len({tuple(sample.tokens) for sample in together}) == 4


@pytest.mark.parametrize("rule", RULES)
def test_greedy_text_is_plain_decodings(rule: str) -> None:
    ask = StageRequest(PROMPT, SamplingParams(temperature=0, max_tokens=40, repetition_penalty=1.2), 1)
    (sample,) = decode(STAGE.open_runner(8192), [(ask, subject_of(RULES[rule]).strategy(STAGE, 4))])
    assert sample.tokens == STAGE.expected(ask).output
    assert sample.metrics.accepted_tokens > 0
