"""Tests U3, the distribution of sampled texts: compares counts of draws with exact probabilities, computed by
definition."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from parlay.engine import Limits
from parlay.testing.conformance.compare import Excuse
from parlay.testing.conformance.stage import Stage, StageRequest, Subject, decode
from parlay.testing.conformance.universal import SHORT, KitLength
from parlay.testing.reference import LogitsOf
from parlay.types import Exactness, SamplingParams

LENGTH = 3
"""Tokens per draw: the one at the root, one that may have been drafted, and one below that."""

TRUNCATED = SamplingParams(temperature=1.3, top_k=3, top_p=0.85)

UNLIKELY = 1e-6
"""At fixed seeds, a p-value below this is no accident."""


def distribution(subject: Subject, stage: Stage, effort: KitLength) -> list[Excuse]:
    """U3: drawn texts have the target's distribution, under temperature alone, and with top-k and top-p together. The
    long form tests all combinations of the three. Lossy rules promise no distribution.

    Counts of draws show coarse faults, such as an outcome that is a tenth too frequent. Each rule is proved in a test
    of its own, which enumerates its random numbers.
    """
    if subject.rule().exactness is Exactness.LOSSY:
        return []
    if effort.draws > SHORT.draws:
        shares = [(params, effort.draws // 8) for params in settings()]
    else:
        truncated = effort.draws // 4  # these cost more
        shares = [(SamplingParams(temperature=0.8), effort.draws - truncated), (TRUNCATED, truncated)]
    for params, draws in shares:
        _count(subject, stage, params, draws)
    return []


def _count(subject: Subject, stage: Stage, params: SamplingParams, draws: int) -> None:
    params = replace(params, max_tokens=LENGTH)
    prompt = (1, 0, 2, 1, 0)
    expected = dict(text_distribution(stage.text_logits, prompt, params, LENGTH))
    strategy = subject.strategy(stage, budget=4)
    jobs = [(StageRequest(prompt, params, seed), strategy) for seed in range(draws)]
    samples = decode(stage.open_runner(8192), jobs, Limits(max_sequences=256, max_rows=2048, max_draft_rows=1024))
    counts = Counter(tuple(sample.tokens) for sample in samples)
    impossible = [text for text in counts if text not in expected]
    assert not impossible, f"drew {impossible[0]}, which has no probability"
    chance = chi_square(counts, expected, draws)
    assert chance > UNLIKELY, (
        f"{draws} draws miss the distribution under {params}: such counts have a chance of {chance:.2g}"
    )


def text_distribution(
    logits_of: LogitsOf, prompt: Sequence[int], params: SamplingParams, length: int
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield every text of ``length`` tokens that can be drawn, with its probability."""
    if length == 0:
        yield (), 1.0
        return
    probs_V = token_distribution(logits_of(prompt), params)
    for token in range(len(probs_V)):
        if probs_V[token] > 0:
            for text, probability in text_distribution(logits_of, [*prompt, token], params, length - 1):
                yield (token, *text), probability * float(probs_V[token])


def token_distribution(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Return the probabilities ``[V]`` after temperature, top-k and top-p, applied in this order, each by
    definition."""
    probs_V = (logits_V.double() / params.temperature).softmax(dim=-1)
    order = probs_V.argsort(descending=True, stable=True)
    keep = order[: params.top_k] if params.top_k > 0 else order
    before = probs_V[keep].cumsum(dim=-1) / probs_V[keep].sum() - probs_V[keep] / probs_V[keep].sum()
    keep = keep[before < params.top_p]
    result = torch.zeros_like(probs_V)
    result[keep] = probs_V[keep]
    return result / result.sum()


def chi_square(
    counts: Mapping[tuple[int, ...], int], distribution: Mapping[tuple[int, ...], float], draws: int
) -> float:
    """Return the p-value of Pearson's chi-square test. Outcomes that are expected fewer than five times are pooled."""
    rare = [text for text, probability in distribution.items() if probability * draws < 5]
    cells = [([text], probability) for text, probability in distribution.items() if probability * draws >= 5]
    rest = sum(distribution[text] for text in rare)
    if rest * draws >= 1:
        cells.append((rare, rest))
    statistic = sum(
        (sum(counts.get(text, 0) for text in texts) - probability * draws) ** 2 / (probability * draws)
        for texts, probability in cells
    )
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def settings() -> Iterator[SamplingParams]:
    for temperature, top_k, top_p in itertools.product((0.7, 1.3), (0, 3), (1.0, 0.85)):
        yield SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
