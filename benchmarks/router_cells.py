"""Orders the settings of `benchmarks.router` so that the first ones, however many, are a fair sample of all."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations

from parlay.bench.runner import BenchPlan, BenchSetting

LARGEST = 32_768
"""The most tokens of context of all requests of a cell together. More would take minutes to read, and most of the
memory."""

Setting = tuple[str, BenchSetting]
"""A model, and the conditions of one comparison."""


def settings(plans: Sequence[BenchPlan]) -> list[Setting]:
    """Return the settings of all plans, without those whose prompts have more than `LARGEST` tokens together."""
    found = ((plan.model, setting) for plan in plans for setting in plan.settings())
    return [each for each in found if each[1].concurrency * each[1].context <= LARGEST]


def spread(wanted: Sequence[Setting], seed: int = 0) -> list[Setting]:
    """Order the settings: the next one is always one whose values, and pairs of values, were least frequent so far."""
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
    """Return each value and each pair of values, with their places in the setting."""
    model, conditions = setting
    values = (model, *conditions)
    places = range(len(values))
    chosen = [*combinations(places, 1), *combinations(places, 2)]
    return [(where, tuple(values[place] for place in where)) for where in chosen]


def left_over(order: Sequence[Setting], rounds: int, done: Callable[[Setting], int]) -> Iterator[Setting]:
    """Yield the settings that lack a round: first all that lack the first round, then all that lack the second, and so
    on."""
    for number in range(rounds):
        for setting in order:
            if done(setting) <= number:
                yield setting
