"""Searching for sub-layers to skip: the optimiser on a planted optimum, agreement and speed by hand."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from parlay.drafters.self_speculation.layer_search import ParzenSearch, agreement, speedup
from parlay.types import WHOLE_FORM, DraftForm, NoiseKey, Request, SamplingParams, SequenceView, Skip, Sublayer

HALVES: tuple[Sublayer, ...] = tuple((half, layer) for layer in range(12) for half in ("attention", "mlp"))  # type: ignore[misc]
PLANTED: Skip = frozenset(HALVES[::3] + HALVES[1:6:2])


def best_after(probes: int, search: ParzenSearch, informed: bool) -> float:
    """The best value found: how much of the planted set is in, less what should not be."""
    best = -99.0
    for _ in range(probes):
        skip = search.likely() if informed else search.random()
        value = len(skip & PLANTED) - len(skip - PLANTED)
        search.learn(skip, value)
        best = max(best, value)
    return best


@pytest.mark.parametrize("size", [None, len(PLANTED)])
def test_what_was_learned_beats_chance(size: int | None) -> None:
    informed = [best_after(150, ParzenSearch(HALVES, size, seed), True) for seed in range(5)]
    by_chance = [best_after(150, ParzenSearch(HALVES, size, seed), False) for seed in range(5)]
    assert statistics.mean(informed) > statistics.mean(by_chance) + 2
    assert max(informed) >= len(PLANTED) - 1


def test_sets_keep_to_their_size_and_are_new_while_there_are_new_ones() -> None:
    search = ParzenSearch(HALVES[:6], 3)
    seen: set[Skip] = set()
    for probe in range(40):  # there are 20
        skip = search.likely()
        assert len(skip) == 3
        seen.add(skip)
        search.learn(skip, probe % 7)
    assert len(seen) > 15


def test_the_same_seed_finds_the_same_sets() -> None:
    def run() -> list[Skip]:
        search = ParzenSearch(HALVES, 5, seed=3)
        found = []
        for probe in range(30):
            found.append(search.likely())
            search.learn(found[-1], probe * 7 % 5)
        return found

    assert run() == run()


@dataclass
class Sight:
    tokens: list[int]
    layers: Counting
    request: Request
    sequence: int = 0
    prompt_length: int = 2


class Counting:
    """Says: one more than the last token. Where layers are skipped, after a multiple of three something else."""

    def forward(
        self, views: Sequence[SequenceView], paths: Sequence[Sequence[int]], form: DraftForm = WHOLE_FORM, rows: int = 1
    ) -> Tensor:
        ends = views[0].tokens[-rows:]
        said = [token + (7 if form.skip and token % 3 == 0 else 1) for token in ends]
        return torch.nn.functional.one_hot(torch.tensor(said) % 20, 20).float()


def test_agreement_counts_the_tokens_that_come_out_the_same() -> None:
    """Of the tokens 4 to 9, those after 3 and 6 are missed."""
    request = Request(id="r", prompt=(1, 2), params=SamplingParams(temperature=0), key=NoiseKey(1))
    view = Sight([1, 2, 3, 4, 5, 6, 7, 8, 9], Counting(), request)
    assert agreement(view, 6, frozenset()) == 1
    assert agreement(view, 6, frozenset({("mlp", 1)})) == pytest.approx(4 / 6)


def test_speed_is_that_of_the_formula() -> None:
    """Half a model that is always right: nine tokens for 1 + 8 / 2 forwards. One that is never right: 1 for 1.5."""
    half = [("attention", layer) for layer in range(3)] + [("mlp", layer) for layer in range(3)]
    assert speedup(1.0, half, 6) == pytest.approx(9 / 5)
    assert speedup(0.0, half, 6) == pytest.approx(1 / 1.5)
    assert speedup(0.5, half, 6) == pytest.approx(max((2 - 0.5**n) / (n / 2 + 1) for n in range(1, 9)))
    assert speedup(1.0, [], 6) == pytest.approx(1)


def test_no_set_takes_longer_to_find_the_more_were_tried() -> None:
    looked_at: list[int] = []

    class Counting(ParzenSearch):
        def _chances(self, sets: Sequence[Skip]) -> dict[Sublayer, float]:
            looked_at.append(len(sets))
            return super()._chances(sets)

    search = Counting(HALVES)
    for _ in range(1000):
        search.learn(search.random(), 0.5)
    search.likely()
    assert 0 < sum(looked_at) <= 256
