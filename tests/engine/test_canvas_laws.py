"""Laws of texts on canvases: what is decided in one step is independent, and what is decided after it is not.

Targets that know the exact distribution of each place give success rates that can be computed (ParallelBench's tasks).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from parlay.engine import Engine
from parlay.router.policies import Plain
from parlay.sampling.rules import SharedNoise
from parlay.sampling.selectors import (
    Credit,
    EntropyBound,
    Factor,
    FixedCount,
    KLStability,
    MaskPredict,
    Threshold,
)
from parlay.testing.conformance.distribution import chi_square
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import CanvasLayout, CanvasSpec, NoiseKey, Request, SamplingParams, Selector, Strategy
from tests.engine.toy_engine import PLAIN, committed, engine

ITEMS, PROMPT, DRAWS = 6, (1, 2), 600


def draws(target: Engine, selector: Selector, length: int, count: int = DRAWS) -> tuple[list[tuple[int, ...]], float]:
    """Texts of ``count`` seeds, and tokens per forward."""
    strategy = Strategy("canvas", (), SharedNoise(), Plain(), selector=selector)
    params = SamplingParams(temperature=1, max_tokens=length)
    for seed in range(count):
        target.add(Request(id=str(seed), prompt=PROMPT, params=params, key=NoiseKey(seed)), strategy)
    texts: dict[str, list[int]] = {str(seed): [] for seed in range(count)}
    steps = 0
    while not target.idle:
        for event in target.step():
            texts[event.request] += committed([event])
            steps += 1
    return [tuple(text) for text in texts.values()], length * count / steps


def toy(logits_of: Callable[[Sequence[int]], Tensor], vocab: int, block: int) -> Engine:
    """On a target whose last id is the mask."""
    return engine(ToyRunner(logits_of, vocab, canvas=CanvasSpec(vocab - 1, block=block)), max_draft_rows=512)


# ------------------------------------------------------------------------------------------ against the law of the toy

SMALL = RandomLogits(4, seed=5)


def law(at: int, ids: tuple[int, ...]) -> list[float]:
    """The distribution of place ``at`` where the places read ``ids``; a decided first place has joined the text."""
    joined = int(ids[0] != 3)
    logits_V = SMALL([*PROMPT, *ids, *ids[joined : at + 1]])
    probs: list[float] = logits_V[:3].double().softmax(-1).tolist()
    return probs


def by_order(first: int) -> dict[tuple[int, ...], float]:
    """The joint distribution where place ``first`` is decided before the other."""
    joint = {}
    for pair in itertools.product(range(3), repeat=2):
        seen = (pair[0], 3) if first == 0 else (3, pair[1])
        joint[pair] = law(first, (3, 3))[pair[first]] * law(1 - first, seen)[pair[1 - first]]
    return joint


def at_once() -> dict[tuple[int, ...], float]:
    """The product of the marginals."""
    return {pair: law(0, (3, 3))[pair[0]] * law(1, (3, 3))[pair[1]] for pair in itertools.product(range(3), repeat=2)}


def mixed() -> dict[tuple[int, ...], float]:
    """The mean over both orders."""
    return {pair: (by_order(0)[pair] + by_order(1)[pair]) / 2 for pair in by_order(0)}


SURER = max((0, 1), key=lambda at: max(law(at, (3, 3))))


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (FixedCount("left-to-right"), by_order(0)),
        (FixedCount("confidence"), by_order(SURER)),
        (FixedCount("random"), mixed()),
        (Threshold(0.0), at_once()),
        (FixedCount("random", 2), at_once()),
    ],
    ids=["left to right", "confidence", "random order", "threshold 0", "two at once"],
)
def test_texts_are_distributed_as_the_order_says(selector: Selector, expected: Mapping[tuple[int, ...], float]) -> None:
    texts, _ = draws(toy(SMALL, 4, block=2), selector, 2, 1200)
    assert sum(expected.values()) == pytest.approx(1)
    assert chi_square(Counter(texts), expected, len(texts)) > 1e-3


# ------------------------------------------------------------------------------------------------ against closed forms


def permutation(ids: Sequence[int]) -> Tensor:
    """Each open place has one of the items that no place has yet."""
    used = set(ids[len(PROMPT) : len(PROMPT) + ITEMS])
    return torch.tensor([-torch.inf if item in used else 0.0 for item in range(ITEMS)] + [-torch.inf])


def copy(ids: Sequence[int]) -> Tensor:
    """Each place has its own item, for certain."""
    place = len(ids) - len(PROMPT) - ITEMS - 1
    done = ITEMS - sum(1 for _ in ids[len(PROMPT) + ITEMS :]) if place < 0 else 0
    return torch.tensor([0.0 if item == (place + done) % ITEMS else -torch.inf for item in range(ITEMS + 1)])


def chance(k: int) -> float:
    """Product over the steps, with m items left: m (m - 1) ... (m - k + 1) / m ** k."""
    return math.prod(math.perm(left, k) / left**k for left in range(ITEMS, 0, -k))


@pytest.mark.parametrize(("k", "expected"), [(1, 1.0), (2, 0.3125), (3, 0.1235), (6, 0.0154)])
def test_a_permutation_succeeds_as_often_as_its_closed_form_says(k: int, expected: float) -> None:
    assert chance(k) == pytest.approx(expected, abs=1e-4)
    texts, per_forward = draws(toy(permutation, ITEMS + 1, ITEMS), FixedCount("random", k), ITEMS)
    right = sum(len(set(text)) == ITEMS for text in texts)
    sigma = math.sqrt(DRAWS * expected * (1 - expected))
    assert abs(right - DRAWS * expected) <= 3 * sigma
    assert per_forward == k


@pytest.mark.parametrize("selector", [Threshold(0.9), Factor(1.0), EntropyBound(0.1), KLStability()], ids=str)
def test_careful_selectors_lose_nothing_to_parallelism(selector: Selector) -> None:
    texts, _ = draws(toy(permutation, ITEMS + 1, ITEMS), selector, ITEMS, 50)
    assert all(len(set(text)) == ITEMS for text in texts)


@pytest.mark.parametrize("selector", [Threshold(1.0), Factor(1.0), EntropyBound(0.0), Credit()], ids=str)
def test_careful_selectors_decide_all_that_is_certain_at_once(selector: Selector) -> None:
    texts, per_forward = draws(toy(copy, ITEMS + 1, ITEMS), selector, ITEMS, 5)
    assert set(texts) == {tuple(range(ITEMS))}
    assert per_forward == ITEMS


# ------------------------------------------------------------------------------------------------------- side by side

REAL: tuple[Selector, ...] = (Threshold(0.3), KLStability(0.3, 0.5, 1), Credit(0.4), MaskPredict(3), EntropyBound(1.0))


@pytest.mark.parametrize("group", [0, 3])
def test_canvases_of_all_selectors_and_plain_texts_share_forwards_and_change_no_other(group: int) -> None:
    """Groups are filled from left to right; selectors that remember find what they noted."""
    logits_of = RandomLogits(16, seed=3)
    strategies = [
        Strategy(str(each), (), SharedNoise(), Plain(), selector=each, layout=CanvasLayout(group=group))
        for each in REAL
    ]

    def texts(chosen: Sequence[int]) -> list[list[int]]:
        target = toy(logits_of, 16, block=6)
        for at in chosen:
            params = SamplingParams(temperature=0.7, max_tokens=14 + at)
            own = strategies[at] if at < len(strategies) else PLAIN
            target.add(Request(id=str(at), prompt=(at, 2), params=params, key=NoiseKey(at)), own)
        found: dict[str, list[int]] = {str(at): [] for at in chosen}
        while not target.idle:
            for event in target.step():
                found[event.request] += committed([event])
        return list(found.values())

    everyone = list(range(len(strategies) + 1))
    assert texts(everyone) == [text for at in everyone for text in texts([at])]
