"""Selectors: the places that papers would decide, by numbers worked by hand, and nothing that knows the noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from parlay.sampling import selectors
from parlay.sampling.selectors import (
    Credit,
    EntropyBound,
    EntropyDistance,
    Factor,
    FixedCount,
    JointThreshold,
    KLStability,
    MaskPredict,
    Threshold,
    still_masked,
    within_entropy,
    within_factor,
)
from parlay.testing.reference import ReferenceText
from parlay.types import (
    Canvas,
    CanvasSpec,
    Decided,
    Exactness,
    Fill,
    Guesses,
    NoiseKey,
    Request,
    SamplingParams,
    Selector,
)

SPEC = CanvasSpec(mask_id=3)
ROWS = ((0.50, 0.45, 0.05), (0.90, 0.05, 0.05), (0.60, 0.20, 0.20), (0.98, 0.01, 0.01))
"""Confidences 0.5, 0.9, 0.6, 0.98; margins 0.05, 0.85, 0.4, 0.97; entropies 0.856, 0.394, 0.950, 0.112."""


def view(seed: int = 0, temperature: float = 0.0) -> ReferenceText:
    params = SamplingParams(temperature=temperature, max_tokens=9)
    return ReferenceText(Request(id="a", prompt=(1, 2), params=params, key=NoiseKey(seed)), [1, 2], 2)


def fill(
    selector: Selector,
    rows: Sequence[Sequence[float]] = ROWS,
    *,
    memory: Mapping[int, Tensor] | None = None,
    seed: int = 0,
    temperature: float = 0.0,
) -> Fill:
    """What it fills of an open canvas, guessed as these rows say."""
    probs = torch.tensor(rows, dtype=torch.float64)
    canvas = Canvas(SPEC, (None,) * len(rows), len(rows), memory=memory or {})
    guesses = Guesses(tuple(range(len(rows))), tuple(probs.argmax(-1).tolist()), probs)
    (filled,) = selector.fill([view(seed, temperature)], [canvas], [guesses])
    return filled


@pytest.mark.parametrize(
    ("selector", "places"),
    [
        (FixedCount("confidence", 2), (3, 1)),
        (FixedCount("margin", 3), (3, 1, 2)),
        (FixedCount("entropy", 3), (3, 1, 0)),  # 0.856 nats before 0.950: another order than by confidence
        (FixedCount("left-to-right", 2), (0, 1)),
        (FixedCount("confidence", 9), (3, 1, 2, 0)),
        (Threshold(0.9), (1, 3)),
        (Threshold(0.95), (3,)),
        (Threshold(0.99), (3,)),  # nobody: the surest
        (Threshold(1.0), (3,)),
        (Threshold(0.0), (0, 1, 2, 3)),
        (Factor(1.0), (3, 1)),  # 2 * 0.02 and 3 * 0.1 are below 1, 4 * 0.4 and 5 * 0.5 are not
        (Factor(2.0), (3, 1, 2)),
        (Factor(0.0), (3,)),
        (EntropyBound(0.1), (3,)),  # 0.112 is above 0.1
        (EntropyBound(0.2), (3, 1)),
        (EntropyBound(0.51), (3, 1, 0)),  # 0.112 + 0.394 = 0.506
        (EntropyBound(0.0), (3,)),
        (EntropyDistance(0.5, 0.0), (1, 3)),
        (EntropyDistance(0.45, 0.1), (3,)),  # 0.394 + 0.1 is above 0.45, 0.112 + 0.3 is not
        (EntropyDistance(0.0, 0.3), (1,)),  # nobody: 0.394 + 0.3 is the lowest
    ],
    ids=str,
)
def test_places_are_those_of_the_paper(selector: Selector, places: tuple[int, ...]) -> None:
    filled = fill(selector)
    assert filled.places == places
    assert filled.tokens == (0,) * len(places)
    assert (selector.exactness, selector.revokes) == (Exactness.LOSSY, False)


def test_edits_end_when_nothing_changes_or_their_forwards_are_spent() -> None:
    """Place 0 keeps its token, place 1 is not sure enough, place 2 is replaced."""
    probs = torch.tensor([[0.95, 0.05, 0.0], [0.3, 0.7, 0.0], [0.0, 0.1, 0.9]], dtype=torch.float64)
    guesses = Guesses((0, 1, 2), (0, 1, 2), probs)

    def after(decided: Sequence[int | None], full: int, steps: int, edit: float = 0.9) -> Fill:
        places = tuple(None if token is None else Decided(token, 0.0) for token in decided)
        (found,) = JointThreshold(0.9, edit, steps).fill([view()], [Canvas(SPEC, places, 3, full=full)], [guesses])
        return found

    assert after([0, 0, 1], 0, 5) == Fill((2,), (2,), again=True)
    assert after([0, 0, 1], 3, 5) == Fill((2,), (2,), again=True)
    assert after([0, 0, 1], 4, 5) == Fill((2,), (2,)), "the fifth forward is the last"
    assert after([0, 0, 2], 0, 5) == Fill((), ()), "nothing changed"
    assert after([0, 0, 2], 0, 5, edit=0) == Fill((1,), (1,), again=True)
    assert after([None, None, 1], 0, 5) == Fill((0, 2), (0, 2)), "place 1 is open yet"
    assert after([0, None, 1], 0, 5) == Fill((1, 2), (1, 2), again=True), "all are decided, and seen once more"
    assert after([0, None, 1], 0, 0) == Fill((1, 2), (1, 2)), "no forwards for edits"


def test_a_certain_place_reaches_a_threshold_of_one() -> None:
    """With "more than" in place of "at least", a threshold of 1 would mean one place per step."""
    assert fill(Threshold(1.0), ((1.0, 0, 0), (0.5, 0.5, 0), (1.0, 0, 0))).places == (0, 2)


def test_equal_scores_are_decided_from_left_to_right() -> None:
    assert fill(FixedCount("confidence", 2), ((0.5, 0.3, 0.2),) * 4).places == (0, 1)


@pytest.mark.parametrize("factor", [0.3, 0.7, 1.0, 1.9, 5.0])
def test_the_factor_is_a_search_over_all_counts(factor: float) -> None:
    scores = torch.rand(12, generator=torch.Generator().manual_seed(3)).tolist()
    ranked = sorted(scores, reverse=True)
    most = max((n for n in range(1, 13) if (n + 1) * (1 - ranked[n - 1]) < factor), default=1)
    assert [scores[at] for at in within_factor(scores, factor)] == ranked[:most]


@pytest.mark.parametrize("bound", [0.0, 0.3, 1.0, 4.0, 99.0])
def test_the_entropy_bound_is_a_search_over_all_counts(bound: float) -> None:
    entropies = torch.rand(12, generator=torch.Generator().manual_seed(4)).tolist()
    ranked = sorted(entropies)
    most = max(n for n in range(1, 13) if sum(ranked[:n]) - ranked[n - 1] <= bound)
    assert [entropies[at] for at in within_entropy(entropies, bound)] == ranked[:most]


def test_the_random_order_follows_from_the_seed_and_the_position_alone() -> None:
    orders = {fill(FixedCount("random", 4), seed=seed).places for seed in range(40)}
    assert len(orders) > 10
    assert fill(FixedCount("random", 4), seed=7) == fill(FixedCount("random", 4), ((0.4, 0.3, 0.3),) * 4, seed=7)


def test_no_selector_ranks_by_the_token_that_was_drawn() -> None:
    """Otherwise the text's distribution would not be the model's."""
    probs = torch.tensor(ROWS, dtype=torch.float64)
    canvas, numbers = Canvas(SPEC, (None,) * 4, 4), torch.arange(36.0).view(4, 9).sin()
    for name, make in selectors.BY_NAME.items():
        if name != "mask-predict":  # which is greedy by definition
            places = {
                make().fill([view(temperature=1)], [canvas], [Guesses((0, 1, 2, 3), drawn, probs, numbers)])[0].places
                for drawn in ((0, 0, 0, 0), (2, 1, 2, 1))
            }
            assert len(places) == 1, name


def test_kl_stability_waits_until_a_distribution_has_stood_still() -> None:
    selector, rows = KLStability(threshold=0.85, kl=0.01, history=2), ((0.9, 0.05, 0.05), (0.95, 0.03, 0.02))
    first = fill(selector, rows)
    assert first.places == (1,)  # nothing is settled yet: the surest
    second = fill(selector, rows, memory=first.memory)
    assert second.places == (1,)  # settled for one step
    assert fill(selector, rows, memory=second.memory).places == (0, 1)
    moved = ((0.86, 0.13, 0.01), rows[1])  # KL is 0.0674 nats
    assert selectors.divergence(*(torch.tensor(row) for row in (moved[0], rows[0]))) == pytest.approx(
        0.86 * math.log(0.86 / 0.9) + 0.13 * math.log(0.13 / 0.05) + 0.01 * math.log(0.01 / 0.05)
    )
    assert fill(selector, moved, memory=second.memory).places == (1,)


def test_credit_sharpens_what_was_guessed_before() -> None:
    selector = Credit(threshold=0.6, alpha=1.0, gamma=1.0, decay=0.5)
    rows = ((0.5, 0.45, 0.05), (0.4, 0.35, 0.25))
    # C = 0.5: 0.5 * 1.5 / (0.75 + 0.5) = 0.6. C = 0.4: 0.4 * 1.4 / (0.56 + 0.6) = 0.483
    first = fill(selector, rows)
    assert first.places == (0,)
    assert first.memory[1].tolist() == pytest.approx([0.4, 0, 0])
    # C = 0.2 + 0.4 = 0.6: 0.4 * 1.6 / (0.64 + 0.6) = 0.516
    second = fill(selector, rows, memory=first.memory)
    assert second.memory[1].tolist() == pytest.approx([0.6, 0, 0])
    turned = fill(selector, ((0.5, 0.45, 0.05), (0.38, 0.39, 0.23)), memory=second.memory)
    # C = (0.3, 0.39, 0): 0.494 and 0.542 of 1.266, so nothing reaches 0.6 there
    assert turned.places == (0,)
    strict = Credit(threshold=0.0, alpha=9.0, gamma=1.0, decay=1.0)
    held = {0: torch.tensor([5.0, 0, 0], dtype=torch.float64)}
    assert fill(strict, ((0.4, 0.5, 0.1),), memory=held).tokens == (0,)  # the credited token, which is greedy's
    assert fill(strict, ((0.4, 0.5, 0.1),), memory=held, temperature=1.0).tokens == (1,)  # the sampler's


@pytest.mark.parametrize(
    ("size", "steps", "left"), [(6, 3, (4, 2, 0)), (7, 3, (4, 2, 0)), (5, 10, (4, 3, 2, 1, 0)), (4, 1, (0,))]
)
def test_mask_predict_masks_as_many_as_its_schedule_says(size: int, steps: int, left: tuple[int, ...]) -> None:
    assert tuple(still_masked(size, steps, step) for step in range(1, len(left) + 1)) == left
    generator = torch.Generator().manual_seed(size)
    canvas = Canvas(SPEC, (None,) * size, size)
    for masked in left:
        probs = torch.rand(size, 3, dtype=torch.float64, generator=generator).softmax(-1)
        guesses = Guesses(tuple(range(size)), tuple(probs.argmax(-1).tolist()), probs)
        (filled,) = MaskPredict(steps).fill([view()], [canvas], [guesses])
        places = [None if place in filled.reopened else decided for place, decided in enumerate(canvas.places)]
        for place, token in zip(filled.places, filled.tokens, strict=True):
            places[place] = Decided(token, math.log(probs[place, token].item()))
        canvas = Canvas(SPEC, tuple(places), size, canvas.forwards + 1)
        assert len(canvas.open) == masked


def test_mask_predict_opens_the_least_likely_again_and_keeps_old_scores() -> None:
    decided = (Decided(0, math.log(0.3)), None, Decided(2, math.log(0.8)), None)
    canvas = Canvas(SPEC, decided, 4, forwards=1)
    probs = torch.tensor(((0.9, 0.05, 0.05), (0.7, 0.2, 0.1), (0.1, 0.1, 0.8), (0.2, 0.6, 0.2)), dtype=torch.float64)
    (filled,) = MaskPredict(4).fill([view()], [canvas], [Guesses((0, 1, 2, 3), (0, 0, 2, 1), probs)])
    # 4 * (4 - 2) / 4 = 2 stay masked: those of 0.3 (as it was chosen, not 0.9) and 0.6
    assert (filled.places, filled.tokens, filled.reopened) == ((1,), (0,), (0,))
