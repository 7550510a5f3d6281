"""Which way to decode is cheapest now, among those that a request allows: by what each took lately, and by the load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple, Protocol, TypeVar

from parlay.types import Cost, EngineStats, Metrics

TRIAL = 32
"""A way that is dearer is taken once in so many choices, so that it is noticed when that has changed."""
FEW = 4
"""Fewer answers than this say nothing of a way."""
_KEPT = 0.9
"""What counts of earlier answers after one more."""
_MOST = 256
"""Ways and kinds that are known: clients may name strategies without end."""
_LEAST = 1e-9

V = TypeVar("V")


class Loaded(Protocol):
    """A loaded model, as its engine has it: what rows cost, and what is under way."""

    @property
    def cost(self) -> Cost: ...

    def stats(self) -> EngineStats: ...


class Way(NamedTuple):
    """A strategy, and how much faster than the first of several it was in calibration."""

    strategy: str
    speed: float = 1.0


@dataclass(slots=True)
class _Lately:
    """Sums over the last answers of one way to requests of one kind; ``context`` is a mean."""

    answers: int = 0
    tokens: float = 0.0
    steps: float = 0.0
    rows: float = 0.0
    drafting: float = 0.0
    context: float = 0.0

    def add(self, metrics: Metrics) -> None:
        self.answers += 1
        self.tokens = _KEPT * self.tokens + metrics.completion_tokens
        self.steps = _KEPT * self.steps + metrics.steps
        self.rows = _KEPT * self.rows + metrics.rows
        self.drafting = _KEPT * self.drafting + metrics.draft_seconds
        length = metrics.prompt_tokens + metrics.completion_tokens / 2
        self.context = length if not self.context else _KEPT * self.context + (1 - _KEPT) * length


class Ways:
    """Prices of ways to decode, each in seconds per token, by kind of request.

    A way takes so many forwards for a token, and so many rows in each; both follow from the answers that it gave
    lately. What these rows cost depends on what runs beside them: alone a forward costs its whole time, beside others
    only what its rows add. So a way of few forwards with many rows pays alone, and may not under load. Before a way has
    given a few answers, it is priced by what it gained in calibration. Any thread may call.
    """

    def __init__(self, model: Loaded) -> None:
        self._model, self._lock = model, Lock()
        self._lately: dict[tuple[str, str], _Lately] = {}
        self._passed: dict[tuple[str, str], int] = {}
        """How often each was not taken since it was."""

    def learn(self, kind: str, metrics: Metrics) -> None:
        """Learn from an answer that is over to a request of this kind."""
        if metrics.steps and metrics.completion_tokens:
            with self._lock:
                lately = self._lately.get((metrics.strategy, kind)) or _Lately()
                lately.add(metrics)
                _put(self._lately, (metrics.strategy, kind), lately)

    def price(self, strategy: str, kind: str) -> float | None:
        """Seconds per token at the present load; None of a way without enough answers."""
        lately = self._lately.get((strategy, kind))
        if lately is None or lately.answers < FEW:
            return None
        stats, forward, context = self._model.stats(), self._model.cost.forward, round(lately.context)
        others = stats.running + stats.waiting
        rows = max(1, round(lately.rows / lately.steps))
        more = forward(others + rows, context) - (forward(others, context) if others else 0.0)
        return (max(more, _LEAST) * lately.steps + lately.drafting) / lately.tokens

    def cheapest(self, ways: Sequence[Way], kind: str) -> int:
        """Choose among ways, of which the first is exact decoding: the number of the cheapest.

        A way that was passed over `TRIAL` times is tried.
        """
        with self._lock:
            prices = self._prices(ways, kind)
            best = min(range(len(ways)), key=prices.__getitem__)
            passed = [self._passed.get((way.strategy, kind), 0) for way in ways]
            if max(passed) >= TRIAL:
                best = passed.index(max(passed))
            for number, way in enumerate(ways):
                _put(self._passed, (way.strategy, kind), 0 if number == best else passed[number] + 1)
        return best

    def _prices(self, ways: Sequence[Way], kind: str) -> list[float]:
        """Prices of all, those without answers by the mean of what calibration makes of the others'."""
        known = [self.price(way.strategy, kind) for way in ways]
        plain = [price * way.speed for price, way in zip(known, ways, strict=True) if price is not None]
        usual = sum(plain) / len(plain) if plain else 1.0
        return [usual / way.speed if price is None else price for price, way in zip(known, ways, strict=True)]


def _put(known: dict[tuple[str, str], V], key: tuple[str, str], value: V) -> None:
    """Put what is known of a way last, and drop the first if there are too many."""
    known.pop(key, None)
    known[key] = value
    if len(known) > _MOST:
        known.pop(next(iter(known)))
