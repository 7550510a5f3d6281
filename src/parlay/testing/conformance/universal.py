"""The universal tests: properties that every strategy must have on every stage, whatever it drafts.

Each check takes a subject, a stage and an effort, and raises AssertionError if the property does not hold. It compares
texts with those of the slow reference decoder, which has no cache, no drafts and no batch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from parlay.engine import Limits
from parlay.router.policies import adaptive
from parlay.testing import toy_drafters
from parlay.testing.conformance.compare import Excuse, comparable, same_tokens
from parlay.testing.conformance.stage import PLAIN, Stage, StageRequest, StageSample, Steady, Subject, decode
from parlay.testing.reference import ReferenceText
from parlay.testing.toy_constraint import ToyGrammar
from parlay.types import TARGET, Runner, SamplingParams, Strategy

CAPACITY = 8192
"""Tokens that a runner's cache holds in tests that do not test memory."""

BUDGETS = (0, 1, 2, 5, 16)


@dataclass(frozen=True, slots=True)
class KitLength:
    """The length of a run. ``tokens``: tokens of the long texts, of which other texts have a fixed share. ``draws``:
    texts drawn to test the distribution."""

    tokens: int
    draws: int


SHORT = KitLength(tokens=48, draws=2_000)
LONG = KitLength(tokens=400, draws=40_000)

GREEDY = SamplingParams(temperature=0.0)


def favour_even(ids: list[int], logits_V: Tensor) -> Tensor:
    """Raise the logits of even ids if the ids so far sum to an odd number: a logits processor that depends on the whole
    path."""
    result = logits_V.clone()
    if sum(ids) % 2:
        result[::2] += 2.0
    return result


VARIETY = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.05, typical_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.9, presence_penalty=0.7, frequency_penalty=0.4),
    SamplingParams(temperature=1.0, logit_bias={1: 1.5, 2: -2.0}, allowed_token_ids=tuple(range(1, 12))),
    SamplingParams(temperature=0.8, logits_processors=(favour_even,), logprobs=3, logprobs_mode="processed"),
)
"""Eight sampling parameters for a mixed batch: every way to choose tokens, penalties, and a processor that depends on
the path."""


def prompt(stage: Stage, seed: int, length: int) -> tuple[int, ...]:
    """Return random ids whose second half repeats the first, so that drafters that copy find a match."""
    chance = random.Random(seed)
    half = [chance.randrange(stage.vocab_size) for _ in range((length + 1) // 2)]
    return tuple((half + half)[:length])


def agree(
    stage: Stage,
    jobs: Sequence[tuple[StageRequest, Strategy]],
    limits: Limits | None = None,
    *,
    capacity: int = CAPACITY,
    runner: Runner | None = None,
    faults: bool = False,
) -> list[Excuse]:
    """Decode the jobs together. Each must give the reference's tokens, ending and logprobs, if its rule promises that.

    Unless ``faults`` is set, no drafter may raise: the engine would go on without the drafter, and nothing would be
    tested.
    """
    samples = decode(runner or stage.open_runner(capacity), jobs, limits)
    excuses: list[Excuse] = []
    for (ask, strategy), sample in zip(jobs, samples, strict=True):
        error = sample.last.error if sample.last else "it never ended"
        assert error is None, f"a request failed: {error}"
        same_counts(sample)
        fault = sample.drafter_fault or "it does not say how"
        assert faults or not sample.metrics.drafter_faults, f"the drafter of {strategy.name} failed in {fault}"
        if comparable(strategy, ask):
            known = stage.expected(ask, limits.max_context if limits else None)
            excuse = same_tokens(stage, ask, known.output, sample)
            if excuse is not None:
                excuses.append(excuse)
            else:
                same_ending(stage, ask, sample, known)
    return excuses


def same_ending(stage: Stage, ask: StageRequest, sample: StageSample, known: ReferenceText) -> None:
    """Check that the sample ends for the reference's reason and has the reference's logprobs, to within the stage's
    noise bound."""
    assert sample.ending[0] == known.finish_reason, f"ends with {sample.ending[0]}, expected {known.finish_reason}"
    if ask.params.logprobs is None:
        return
    got = [one.logprobs for one in sample.committed]
    if stage.noise_bound == 0:
        assert got == known.logprobs, f"logprobs differ: {got} instead of {known.logprobs}"
    for one, other in zip(got, known.logprobs, strict=True):
        assert one is not None
        gap = abs(one.logprob - other.logprob)
        assert gap <= 2 * stage.noise_bound, f"the logprob of token {one.token} is {gap:.3g} off"


def same_counts(sample: StageSample) -> None:
    """Check that the metrics agree with the events."""
    metrics = sample.metrics
    drafted = sum(one.source != TARGET for one in sample.committed)
    assert metrics.completion_tokens == len(sample.committed) == sum(sample.steps)
    assert metrics.steps == len(sample.steps), f"{metrics.steps} steps counted, {len(sample.steps)} committed"
    assert metrics.accepted_tokens == drafted == sum(metrics.accepted_by_depth)
    assert metrics.accepted_tokens == sum(metrics.accepted_by_source.values())
    assert metrics.draft_tokens == sum(metrics.drafted_by_source.values()) == sum(metrics.drafted_by_depth)
    assert metrics.accepted_tokens <= metrics.draft_tokens
    assert metrics.draft_steps <= metrics.steps


def greedy(subject: Subject, stage: Stage, effort: KitLength) -> list[Excuse]:
    """U1: a request alone gives the greedy text under every budget, and at full length under one of them."""
    excuses: list[Excuse] = []
    for budget in BUDGETS:
        length = effort.tokens if budget == BUDGETS[-2] else effort.tokens // 4
        ask = StageRequest(prompt(stage, 1, 40), replace(GREEDY, max_tokens=length))
        excuses += agree(stage, [(ask, subject.strategy(stage, budget))])
    return excuses


def sampled(subject: Subject, stage: Stage, effort: KitLength) -> list[Excuse]:
    """U1 with temperature, truncation, penalties, masks and processors: a request alone with the same seed gives the
    same text."""
    excuses: list[Excuse] = []
    for seed, params in enumerate(VARIETY):
        length = effort.tokens if seed == 0 else effort.tokens // 4
        ask = StageRequest(prompt(stage, seed, 30), replace(params, max_tokens=length), seed)
        excuses += agree(stage, [(ask, subject.strategy(stage, BUDGETS[1 + seed % 4]))])
    return excuses


def mixed(subject: Subject, stage: Stage, effort: KitLength) -> list[Excuse]:
    """U6: eight requests decode together. They differ in all parameters, and some share one instance of the
    strategy."""
    asks = [
        StageRequest(
            prompt(stage, seed, 3 + 17 * (seed % 4)), replace(params, max_tokens=(2 + seed) * effort.tokens // 16), seed
        )
        for seed, params in enumerate(VARIETY)
    ]
    answer = toy_drafters.answer_from(lambda request: stage.expected(asks[request.key.seed]).tokens)
    shared = subject.strategy(stage, 6)
    strategies = (
        shared,
        PLAIN.strategy(stage, 0),
        shared,
        Subject("adversary", lambda _: toy_drafters.adversary(answer, stage.vocab_size)).strategy(stage, 5),
        subject.strategy(stage, 3),
        Subject("tree-oracle", lambda _: toy_drafters.tree_oracle(answer, stage.vocab_size)).strategy(stage, 7),
        shared,
        replace(shared, policy=adaptive(Steady(), 8)),
    )
    jobs = list(zip(asks, strategies, strict=True))
    return agree(stage, jobs)


LENGTH = 20


def constrained(subject: Subject, stage: Stage, effort: KitLength) -> list[Excuse]:
    """Texts follow their grammar and equal the reference's under any budget: alone, in a batch, forked, and preempted
    for lack of memory.

    Under every rule, committing a token that the grammar does not allow makes the request fail.
    """
    asks = [
        StageRequest(
            prompt(stage, 31 + index, 8 + 9 * index),
            replace(params, max_tokens=LENGTH),
            seed=index,
            grammar=ToyGrammar(stage.vocab_size, LENGTH - 6 + 4 * index, index, stage.mask),
        )
        for index, params in enumerate((GREEDY, VARIETY[0], VARIETY[2], VARIETY[5]))
    ]
    excuses = agree(stage, [(ask, subject.strategy(stage, 3 * budget)) for budget, ask in enumerate(asks)])
    siblings = [replace(asks[1], sample_index=index, group="siblings") for index in range(2)]
    shared = subject.strategy(stage, 4)
    jobs = [(ask, shared) for ask in (*siblings, *asks[2:])]
    return excuses + agree(stage, jobs, Limits(max_rows=48, max_draft_rows=12), capacity=112)


ENDINGS_TOKENS = 24


def asks(stage: Stage, effort: KitLength) -> Iterator[StageRequest]:
    """Yield requests that end at any place in a block of drafted tokens, for every finish reason, greedy and sampled.

    In the short form, greedy and sampled texts end at alternate places.
    """
    short = effort.tokens < LONG.tokens
    for first, params in enumerate((GREEDY, VARIETY[0])):
        base = StageRequest(prompt(stage, 7, 20), replace(params, max_tokens=ENDINGS_TOKENS, logprobs=2), seed=3)
        text = stage.expected(base).output
        for length in (0, 1, 2, 3, 5):
            yield replace(base, params=replace(base.params, max_tokens=length))
        for at in range(3 * first, 12, 6) if short else range(0, 12, 3):
            stop = frozenset({text[at]})
            yield replace(base, stop_ids=stop)
            yield replace(base, stop_ids=stop, params=replace(base.params, min_tokens=at + 2))
            yield replace(base, stop_sequence=tuple(text[at : at + 2]))
            yield replace(base, stop_sequence=tuple(text[at : at + 2]), params=replace(base.params, min_tokens=at + 3))


def endings(subject: Subject, stage: Stage, effort: KitLength) -> list[Excuse]:
    """Wherever a request ends, its tokens, finish reason and logprobs equal the reference's. The token that completes a
    stop belongs to the text; no later token does."""
    shared = subject.strategy(stage, 9)
    return agree(stage, [(ask, shared) for ask in asks(stage, effort)])
