"""Chooses the cheapest way to decode among those that a request allows, by recent answers and the present load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple, Protocol, TypeVar

from parlay.types import Cost, EngineStats, Metrics

TRIAL = 32
"""Choices after which a dearer way is taken once, so that a change of its price is noticed."""
FEW = 4
"""Answers of a way before it has a price of its own."""
_KEPT = 0.9
"""Weight of earlier answers after one more."""
_MOST = 256
"""Most pairs of way and kind that are kept: clients may name any number of strategies."""
_LEAST = 1e-9

V = TypeVar("V")


class Loaded(Protocol):
    """A loaded model: the cost of its forwards, and the engine's statistics."""

    @property
    def cost(self) -> Cost: ...

    def stats(self) -> EngineStats: ...


class Way(NamedTuple):
    """A strategy, and its speed in calibration relative to exact decoding."""

    strategy: str
    speed: float = 1.0


@dataclass(slots=True)
class _Lately:
    """Decaying sums over the last answers of one way to requests of one kind; ``context`` is a mean."""

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

    Recent answers tell how many forwards a way takes per token, and how many rows in each. The price of these rows
    depends on the load: alone, a forward costs its whole time; beside other requests, only the time that its rows add.
    So a way of few forwards with many rows may pay alone but not under load. Before a way has given a few answers, its
    price follows from its speed in calibration. Any thread may call.
    """

    def __init__(self, model: Loaded) -> None:
        self._model, self._lock = model, Lock()
        self._lately: dict[tuple[str, str], _Lately] = {}
        self._passed: dict[tuple[str, str], int] = {}
        """How often each way was passed over since it was last taken."""

    def learn(self, kind: str, metrics: Metrics) -> None:
        """Learn from a finished answer to a request of this kind."""
        if metrics.steps and metrics.completion_tokens:
            with self._lock:
                lately = self._lately.get((metrics.strategy, kind)) or _Lately()
                lately.add(metrics)
                _put(self._lately, (metrics.strategy, kind), lately)

    def price(self, strategy: str, kind: str) -> float | None:
        """Seconds per token at the present load; None without enough answers."""
        lately = self._lately.get((strategy, kind))
        if lately is None or lately.answers < FEW:
            return None
        stats, forward, context = self._model.stats(), self._model.cost.forward, round(lately.context)
        others = stats.running + stats.waiting
        rows = max(1, round(lately.rows / lately.steps))
        more = forward(others + rows, context) - (forward(others, context) if others else 0.0)
        return (max(more, _LEAST) * lately.steps + lately.drafting) / lately.tokens

    def cheapest(self, ways: Sequence[Way], kind: str) -> int:
        """Return the number of the cheapest of ``ways``, the first of which is exact decoding.

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
        """Return the prices of all ways.

        A way without answers is priced by its calibrated speed and the mean of the others.
        """
        known = [self.price(way.strategy, kind) for way in ways]
        plain = [price * way.speed for price, way in zip(known, ways, strict=True) if price is not None]
        usual = sum(plain) / len(plain) if plain else 1.0
        return [usual / way.speed if price is None else price for price, way in zip(known, ways, strict=True)]


def _put(known: dict[tuple[str, str], V], key: tuple[str, str], value: V) -> None:
    """Store the value as the latest, and drop the oldest if there are too many."""
    known.pop(key, None)
    known[key] = value
    if len(known) > _MOST:
        known.pop(next(iter(known)))
