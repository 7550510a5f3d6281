"""The sampler draws from the distribution it should, alone or in a batch, and keeps faults in their row."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from parlay.sampling.processors import process
from parlay.sampling.sampler import sample
from parlay.testing import reference
from parlay.testing.reference import ReferenceText
from parlay.types import Fault, SamplingParams

MakeView = Callable[..., ReferenceText]

LOGITS = torch.tensor([0.1, 2.0, -1.0, 1.5, 0.9, -3.0, 1.9, 0.0])


def distribution(params: SamplingParams) -> list[float]:
    """The distribution by hand, in plain Python."""
    weights = [math.exp(logit / params.temperature) for logit in LOGITS.tolist()]
    ranked = sorted(range(8), key=lambda token: -weights[token])
    if params.top_k:
        weights = [w if token in ranked[: params.top_k] else 0.0 for token, w in enumerate(weights)]
    if params.top_p < 1:
        weights = cut(weights, ranked, params.top_p)
    if params.min_p:
        weights = [w if w >= params.min_p * max(weights) else 0.0 for w in weights]
    if params.typical_p < 1:
        probs = [w / sum(weights) for w in weights]
        entropy = -sum(p * math.log(p) for p in probs if p)
        surprising = sorted(range(8), key=lambda t: abs(-math.log(probs[t]) - entropy) if probs[t] else math.inf)
        weights = cut(weights, surprising, params.typical_p)
    return [w / sum(weights) for w in weights]


def cut(weights: list[float], order: list[int], mass: float) -> list[float]:
    kept, reached = set(), 0.0
    for token in order:
        if reached < mass * sum(weights):
            kept.add(token)
            reached += weights[token]
    return [w if token in kept else 0.0 for token, w in enumerate(weights)]


@pytest.mark.parametrize(
    ("params", "draws"),
    [
        (SamplingParams(), 10_000),
        (SamplingParams(temperature=0.6), 10_000),
        (SamplingParams(temperature=1.8, top_k=4), 2_000),
        (SamplingParams(top_p=0.8), 2_000),
        (SamplingParams(min_p=0.3), 2_000),
        (SamplingParams(typical_p=0.7), 2_000),
        (SamplingParams(temperature=1.3, top_k=6, top_p=0.9, min_p=0.05, typical_p=0.95), 2_000),
    ],
)
def test_frequencies_follow_the_distribution(params: SamplingParams, draws: int, view: MakeView) -> None:
    """Chi-square over seeds, and nothing outside the distribution's support."""
    views = [view(params, seed=seed) for seed in range(draws)]
    tokens = sample(LOGITS.expand(draws, 8), views, [()] * draws)
    probs = distribution(params)
    counts = [tokens.count(token) for token in range(8)]
    support = [token for token in range(8) if probs[token] > 0]
    assert sum(counts[token] for token in support) == draws
    statistic = sum((counts[t] - draws * probs[t]) ** 2 / (draws * probs[t]) for t in support)
    assert statistic < 30  # 7 degrees of freedom: one in 10,000


VARIETY = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.4, top_p=0.9),
    SamplingParams(temperature=0.4, top_p=0.6),
    SamplingParams(top_k=5),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9),
    SamplingParams(temperature=0, repetition_penalty=1.5),
    SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, top_k=7),
    SamplingParams(typical_p=0.8, min_p=0.01),
    SamplingParams(temperature=0.9, logits_processors=[lambda ids, logits_V: logits_V.roll(sum(ids))]),
    SamplingParams(min_tokens=4),
    SamplingParams(temperature=0, allowed_token_ids=[3, 4, 6]),
]


@pytest.mark.parametrize("size", [8, 50, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_draws_the_reference_token_whatever_is_beside_it(size: int, dtype: torch.dtype, view: MakeView) -> None:
    generator = torch.Generator().manual_seed(size)
    views = [
        view(params, prompt=[1, 2, 3], output=[4] * (seed % 3), seed=seed, stop_ids=[2])
        for seed, params in enumerate(VARIETY * 2)
    ]
    paths = [[5, 2][: seed % 3] for seed in range(len(views))]
    logits_RV = 3 * torch.randn(len(views), size, generator=generator).to(dtype)
    together = sample(logits_RV, views, paths)
    for row, (one, path) in enumerate(zip(views, paths, strict=True)):
        assert sample(logits_RV[row : row + 1], [one], [path]) == [together[row]]
        along = ReferenceText(one.request, [*one.tokens, *path], one.prompt_length)
        assert reference.draw(process(logits_RV[row], along, ()), along) == together[row]


@pytest.mark.parametrize("size", [24, 4096])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.5, 0.95, 1 - 1e-15])
@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0], ids=["flat", "wide", "peaked"])
def test_top_p_draws_the_reference_token(size: int, top_p: float, spread: float, view: MakeView) -> None:
    """Whether or not the token with the best noise stays, where logits are equal, and where the last that stays hangs
    on rounding: 0.3 of flat rows."""
    logits_RV = spread * torch.randn(16, size, generator=torch.Generator().manual_seed(size))
    logits_RV[::2] = logits_RV[::2].round()
    logits_RV[1::4, 10:] = -torch.inf
    views = [view(SamplingParams(top_p=top_p), seed=seed) for seed in range(16)]
    drawn = sample(logits_RV, views, [()] * 16)
    assert drawn == [reference.draw(process(row_V, one, ()), one) for row_V, one in zip(logits_RV, views, strict=True)]


def test_noise_depends_on_seed_sample_and_position_but_not_on_how_the_text_is_cut(view: MakeView) -> None:
    logits_RV = torch.zeros(1, 1000)
    text = view(SamplingParams(), prompt=[1, 2], output=[3], seed=9)
    longer = view(SamplingParams(), prompt=[1, 2], output=[3, 4], seed=9)
    assert sample(logits_RV, [text], [[4]]) == sample(logits_RV, [longer], [[]])
    assert sample(logits_RV, [text], [[]]) != sample(logits_RV, [longer], [[]])
    assert sample(logits_RV, [text], [[]]) != sample(logits_RV, [view(text.request.params, (1, 2), (3,), 10)], [[]])


@pytest.mark.parametrize("size", [9, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_ties_go_to_the_lowest_id(size: int, dtype: torch.dtype, view: MakeView) -> None:
    logits_RV = torch.zeros(4, size, dtype=dtype)
    logits_RV[1, [3, 5]] = 2
    logits_RV[2, size - 1] = 1
    logits_RV[3, [1, size - 2]] = 1
    greedy = view(SamplingParams(temperature=0))
    biased = view(SamplingParams(temperature=0, logit_bias={0: 0.0}))
    expected = [0, 3, size - 1, 1]
    assert sample(logits_RV, [greedy] * 4, [()] * 4) == expected
    assert sample(logits_RV, [biased] * 4, [()] * 4) == expected


def test_a_temperature_near_zero_is_greedy(view: MakeView) -> None:
    logits_RV = torch.randn(20, 50, generator=torch.Generator().manual_seed(3))
    cold = [view(SamplingParams(temperature=1e-6), seed=seed) for seed in range(20)]
    assert sample(logits_RV, cold, [()] * 20) == logits_RV.argmax(-1).tolist()


def raises(ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("broken\ngrammar")


@pytest.mark.parametrize("size", [20, 9000])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_faults_stay_in_their_row(size: int, temperature: float, top_p: float, view: MakeView) -> None:
    logits_RV = torch.randn(6, size, generator=torch.Generator().manual_seed(1))
    logits_RV[1, 7] = torch.nan
    logits_RV[3] = -torch.inf
    logits_RV[4, 2] = torch.inf
    good = SamplingParams(temperature=temperature, top_p=top_p)
    bad = SamplingParams(temperature=temperature, top_p=top_p, logits_processors=[raises])
    views = [view(good, seed=row) for row in range(5)] + [view(bad)]
    tokens = sample(logits_RV, views, [()] * 6)
    assert tokens[0] == sample(logits_RV[:1], views[:1], [()])[0]
    assert tokens[2] == sample(logits_RV[2:3], views[2:3], [()])[0]
    assert isinstance(tokens[0], int)
    assert isinstance(tokens[2], int)
    reasons = [tokens[row].reason for row in (1, 3, 4, 5) if isinstance(tokens[row], Fault)]  # type: ignore[union-attr]
    for reason, word in zip(reasons, ["NaN", "masked", "infinite", "RuntimeError: broken"], strict=True):
        assert word in reason
        assert "\n" not in reason


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"min_p": 0.01, "typical_p": 0.99}])
def test_the_noise_is_that_of_the_position_that_the_caller_gives(view: MakeView, fields: dict[str, float]) -> None:
    """However long the path is that processors see: tokens are the same as after a path that reaches the position."""
    params = SamplingParams(temperature=3.0, **fields)  # type: ignore[arg-type]
    text = view(params)
    rows = LOGITS.expand(12, 8).clone()
    paths = [[0] * length for length in range(12)]
    positions = [len(text.tokens) + length for length in range(12)]
    there = sample(rows, [text] * 12, paths)
    assert sample(rows, [text] * 12, paths, positions) == there
    assert sample(rows, [text] * 12, paths[::-1], positions) == there
    assert len(set(map(str, there))) > 1
