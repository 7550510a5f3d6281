"""Calibrates lossy strategies: decodes held-out prompts exactly and with each strategy, and certifies good ones."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from parlay.certificates.bounds import SCORE, agreement, at_least, fixed_sequence, lower_bound, text_agreement
from parlay.certificates.cascade import THRESHOLDS, CascadeThreshold, RequestCascade, sureness
from parlay.certificates.certificate import Certificate, Certified, Claim, Sampling
from parlay.certificates.gate import rule_level
from parlay.certificates.requirement import Floor
from parlay.llm.llm import LLM
from parlay.llm.outputs import RequestOutput
from parlay.strategies.catalogue import find
from parlay.strategies.spelling import StrategySpec
from parlay.system.progress import Progress, bar
from parlay.types import Exactness, FieldError, Metrics, SamplingParams

_BATCH = 16
"""If strategies fill canvases, this many prompts are decoded together."""
_TIMED_ALONE = 16
"""If prompts are decoded together, this many are decoded alone, to measure the speed."""

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shown:
    """The result of calibrating one strategy.

    ``good`` of its ``answers`` were good. ``bound`` is the Clopper-Pearson bound on the share of good answers for this
    strategy on its own. ``escaped`` counts answers that fell back to exact decoding. ``speed`` is a multiple of exact
    decoding's, as the function `speed` defines it.
    """

    strategy: StrategySpec
    good: int
    answers: int
    bound: float
    mean_agreement: float
    escaped: int
    speed: float
    certified: bool


@dataclass(frozen=True, slots=True)
class Calibration:
    """The results of the strategies in the order of their tests. ``certificate`` is None if none is certified."""

    shown: tuple[Shown, ...]
    certificate: Certificate | None


def calibrate(
    llm: LLM,
    prompts: Sequence[Ids],
    strategies: Sequence[StrategySpec],
    floor: Floor,
    params: SamplingParams,
    *,
    progress: Progress = None,
) -> Calibration:
    """Test strategies in the given order, safest first, and certify those before the first one that fails.

    The order must be fixed before any answers are seen. Let a strategy be wrongly certified if its share of good
    answers is below ``floor.floor``. The probability that any strategy is wrongly certified, over independent draws of
    the prompts, is at most 1 - ``floor.confidence``. Equal prompts count once. All answers to a prompt have the same
    seed.

    Each prompt is decoded alone, because policies draft most then, and lossy accept rules accept most. Prompts are
    decoded together only if all strategies fill canvases, whose texts do not depend on other prompts; the last prompts
    are still decoded alone, to measure the speed. A diffusion model's answers are compared with its own answers at one
    position per forward.

    Raises ValueError for a strategy that is not lossy, parameters that no certificate covers, and too few prompts.
    """
    unique = list(dict.fromkeys(prompts))
    _check(strategies, floor, params, len(unique))
    seed = params.seed or 0
    each = [replace(params, n=1, seed=seed + place) for place in range(len(unique))]
    alone = _alone(strategies, len(unique))
    exact, *lossy = _decoded(llm, unique, each, strategies, progress, alone=alone)
    shown = [
        _shown(strategy, answers, exact, floor, alone) for strategy, answers in zip(strategies, lossy, strict=True)
    ]
    certified = fixed_sequence([at_least(one.good, one.answers, floor.floor) for one in shown], floor.confidence)
    found = tuple(replace(one, certified=place < certified) for place, one in enumerate(shown))
    return Calibration(found, _certificate(llm, unique, found, floor, params) if certified else None)


def calibrate_cascade(
    small: LLM, large: LLM, prompts: Sequence[tuple[Ids, Ids]], floor: Floor, params: SamplingParams
) -> RequestCascade | None:
    """Find the lowest `sureness` at which the small model may answer for the large one.

    Returns None if the small model would answer nothing. ``prompts`` are pairs: each prompt in the small model's
    tokens, and in the large model's. Thresholds are tested from the safest on (Learn then Test with a fixed sequence).
    The probability that the share of good answers is below ``floor.floor`` is at most 1 - ``floor.confidence``. Both
    models decode greedily and exactly. An answer is good if its agreement with the large model's answer, in that
    model's tokens, is at least ``floor.agreement``. Raises ValueError as `calibrate` does.
    """
    unique = list(dict.fromkeys(prompts))
    check_request(floor, params, len(unique))
    if not params.greedy or large.tokenizer is None:
        raise ValueError("a cascade is for greedy requests (temperature=0) and models with a tokenizer")
    first = small.generate([list(ids) for ids, _ in unique], replace(params, logprobs=0), exactness=Exactness.SEED)
    second = large.generate([list(ids) for _, ids in unique], params, exactness=Exactness.SEED)
    sure, good = [], []
    for one, other in zip(first, second, strict=True):
        score = text_agreement(large.tokenizer, one.outputs[0].text, other.outputs[0].text)
        good.append(score >= floor.agreement)
        logprobs = one.outputs[0].logprobs
        sure.append(sureness([entry.logprob for entry in logprobs.entries] if logprobs else []))
    threshold = _threshold(sure, good, floor)
    if threshold is None:
        return None
    bindings = small.gate.binding(), large.gate.binding()
    return RequestCascade(*bindings, Sampling.of(params), _claim([ids for _, ids in unique], floor, params), threshold)


def _threshold(sure: Sequence[float], good: Sequence[bool], floor: Floor) -> CascadeThreshold | None:
    """Return the lowest threshold that is proved to keep the floor; None if the small model would answer nothing.

    At a threshold, answers below it come from the large model and so are good.
    """
    rows = list(zip(sure, good, strict=True))
    goods = [sum(fine or one < least for one, fine in rows) for least in THRESHOLDS]
    shown = fixed_sequence([at_least(count, len(rows), floor.floor) for count in goods], floor.confidence)
    by_small = sum(one >= THRESHOLDS[shown - 1] for one in sure) if shown else 0
    return CascadeThreshold(least=THRESHOLDS[shown - 1], good=goods[shown - 1], by_small=by_small) if by_small else None


def fewest(floor: Floor) -> int:
    """Return how many answers prove the floor if all of them are good: the least n with floor^n <= 1 - confidence.

    Raises ValueError for a floor of 1, which no number of answers proves.
    """
    if floor.floor >= 1:
        raise FieldError("floor", "must be below 1: no sample can prove 100 %; an exact strategy needs no certificate")
    return max(1, math.ceil(math.log(1 - floor.confidence) / math.log(floor.floor))) if floor.floor > 0 else 1


def _check(strategies: Sequence[StrategySpec], floor: Floor, params: SamplingParams, prompts: int) -> None:
    if not strategies:
        raise ValueError("name at least one lossy strategy to calibrate")
    for strategy in strategies:
        if rule_level(strategy) is not Exactness.LOSSY:
            raise ValueError(f"strategy {strategy} is {rule_level(strategy)}, not lossy: it needs no certificate")
    check_request(floor, params, prompts)


def check_request(floor: Floor, params: SamplingParams, prompts: int) -> None:
    """Raise ValueError for parameters that no certificate covers, and for too few prompts."""
    if prompts < fewest(floor):
        raise ValueError(
            f"a floor of {floor.floor:g} with confidence {floor.confidence:g} needs at least {fewest(floor)} different "
            f"prompts with good answers, but there are only {prompts}: give more prompts, or lower the floor"
        )
    if params.edits_logits or params.form:
        raise ValueError(
            "no certificate covers requests that edit logits, use guidance or set a format: remove these parameters"
        )
    if not params.max_tokens:
        raise FieldError("max_tokens", "must be a number: a certificate covers requests up to that length")


def _decoded(
    llm: LLM,
    prompts: Sequence[Ids],
    params: Sequence[SamplingParams],
    strategies: Sequence[StrategySpec],
    progress: Progress,
    *,
    alone: int,
) -> list[list[RequestOutput]]:
    """Return the exact answers to all prompts, then each strategy's. The last ``alone`` prompts are decoded alone.

    Strategies take turns, so that other load of the machine affects all of them alike. The first turn warms up, and its
    answers are dropped.
    """
    ways: list[StrategySpec | None] = [None, *strategies]
    reference = llm.gate.reference
    found: list[list[RequestOutput]] = [[] for _ in ways]
    at_once = len(prompts) - alone
    batches = [slice(start, min(start + _BATCH, at_once)) for start in range(0, at_once, _BATCH)]
    turns = [*batches, *(slice(place, place + 1) for place in range(at_once, len(prompts)))]
    every = (turns[0], *turns)
    with bar(sum(len(prompts[turn]) for turn in every) * len(ways), "Calibrating", "answer", progress) as shown:
        for turn in every:
            for way, answers in zip(ways, found, strict=True):
                llm.reset_prefix_cache()
                batch = [list(ids) for ids in prompts[turn]]
                exactness = Exactness.SEED if way is None and reference is None else None
                new = llm.generate(batch, params[turn], False, strategy=way or reference, exactness=exactness)
                answers += new
                shown.update(len(new))
    return [answers[len(prompts[turns[0]]) :] for answers in found]


def _alone(strategies: Iterable[StrategySpec], prompts: int) -> int:
    """Return how many of the last prompts are decoded alone: all of them, or few if all strategies fill canvases.

    With several sequences at once, policies draft less, so lossy rules would accept fewer tokens that plain decoding
    would not write.
    """
    return min(_TIMED_ALONE, prompts) if all(find(strategy.name).selects for strategy in strategies) else prompts


def _shown(
    strategy: StrategySpec, lossy: Sequence[RequestOutput], exact: Sequence[RequestOutput], floor: Floor, alone: int
) -> Shown:
    pairs = zip(lossy, exact, strict=True)
    scores = [agreement(one.outputs[0].token_ids, other.outputs[0].token_ids) for one, other in pairs]
    good = sum(score >= floor.agreement for score in scores)
    return Shown(
        strategy,
        good,
        len(scores),
        lower_bound(good, len(scores), floor.confidence),
        sum(scores) / len(scores),
        sum(one.outputs[0].metrics.escaped_at is not None for one in lossy),
        speed(counts(lossy[-alone:]), counts(exact[-alone:])),
        certified=False,
    )


def counts(outputs: Sequence[RequestOutput]) -> list[Metrics]:
    """Return the engine's counts for the first sample of each output."""
    return [output.outputs[0].metrics for output in outputs]


def speed(lossy: Sequence[Metrics], exact: Sequence[Metrics]) -> float:
    """Return the tokens per second of lossy answers as a multiple of the exact answers', without first steps.

    If first steps commit several tokens, as on a canvas that is filled at once, whole answers are compared, prefill
    included. If either speed is unknown, returns 1.
    """
    whole = any(sum(one.first_step_tokens for one in each) > len(each) for each in (lossy, exact))
    mine, theirs = (_rate(each, whole=whole) for each in (lossy, exact))
    return mine / theirs if mine and theirs else 1.0


def _rate(each: Sequence[Metrics], *, whole: bool) -> float:
    """Return tokens per second, of ``whole`` answers or after the first step; 0 without any."""
    seconds = sum(one.seconds - (0.0 if whole else one.prefill_seconds) for one in each)
    tokens = sum(one.completion_tokens - (0 if whole else one.first_step_tokens) for one in each)
    return tokens / seconds if seconds > 0 else 0.0


def _certificate(
    llm: LLM, prompts: Sequence[Ids], shown: Sequence[Shown], floor: Floor, params: SamplingParams
) -> Certificate:
    certified = [one for one in shown if one.certified]
    strategies = tuple(Certified(strategy=str(one.strategy), good=one.good, speed=one.speed) for one in certified)
    return Certificate(llm.gate.binding(), Sampling.of(params), _claim(prompts, floor, params), strategies)


def _claim(prompts: Sequence[Ids], floor: Floor, params: SamplingParams) -> Claim:
    assert params.max_tokens is not None
    return Claim(
        answers=len(prompts),
        prompts=hashlib.sha256(json.dumps(sorted(prompts)).encode()).hexdigest(),
        max_tokens=params.max_tokens,
        floor=floor.floor,
        score=SCORE,
        agreement=floor.agreement,
        confidence=floor.confidence,
    )
