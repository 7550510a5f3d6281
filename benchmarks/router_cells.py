"""The cells of `benchmarks.router`, and an order of which every beginning is a fair sample of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations, product
from typing import NamedTuple

from parlay.bench.records import Cell

LARGEST = 32_768
"""Tokens of context of all requests of a cell; above, feeding prompts would take minutes and most of the memory."""


class Setting(NamedTuple):
    """The conditions under which strategies are compared."""

    model: str
    workload: str
    concurrency: int
    temperature: float
    context: int

    def cell(self, strategy: str) -> Cell:
        return Cell(strategy=strategy, **self._asdict())


def settings(
    models: Sequence[str],
    kinds: Sequence[str],
    concurrency: Sequence[int],
    temperatures: Sequence[float],
    contexts: Sequence[int],
) -> list[Setting]:
    """All combinations whose prompts have at most `LARGEST` tokens together."""
    found = (Setting(*each) for each in product(models, kinds, concurrency, temperatures, contexts))
    return [each for each in found if each.concurrency * each.context <= LARGEST]


def spread(wanted: Sequence[Setting], seed: int = 0) -> list[Setting]:
    """In an order in which the next setting is always one whose values, and pairs of values, came least so far."""
    left = list(wanted)
    random.Random(seed).shuffle(left)
    parts = {each: _parts(each) for each in left}
    kinds = Counter(where for where, _ in set(chain.from_iterable(parts.values())))
    came: Counter[tuple[tuple[int, ...], tuple[object, ...]]] = Counter()
    order: list[Setting] = []
    while left:
        chosen = min(left, key=lambda each: sum(kinds[part[0]] * came[part] for part in parts[each]))
        left.remove(chosen)
        order.append(chosen)
        came.update(parts[chosen])
    return order


def _parts(setting: Setting) -> list[tuple[tuple[int, ...], tuple[object, ...]]]:
    """Each value and each pair of values, with their places."""
    places = range(len(setting))
    chosen = [*combinations(places, 1), *combinations(places, 2)]
    return [(where, tuple(setting[place] for place in where)) for where in chosen]


def left_over(order: Sequence[Setting], rounds: int, done: Callable[[Setting], int]) -> Iterator[tuple[Setting, int]]:
    """The rounds that settings lack, with their numbers: the first round of all, then the second."""
    for number in range(rounds):
        for setting in order:
            if done(setting) <= number:
                yield setting, number
