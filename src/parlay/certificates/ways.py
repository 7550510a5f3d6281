"""Chooses the cheapest allowed way to decode a request, by recent answers and the present load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple, Protocol, TypeVar

from parlay.types import Cost, EngineStats, Metrics

TRIAL = 32
"""A way that was not chosen this many times in a row is chosen once, so that a change of its price is noticed."""
FEW = 4
"""Answers that a way must have given before its price is computed from them."""
_DECAY = 0.9
"""Factor by which one more answer multiplies the weight of the earlier ones."""
_MAX_PAIRS = 256
"""Limit on the pairs of way and kind that are kept, because clients may name any number of strategies."""
_MIN_SECONDS = 1e-9

V = TypeVar("V")


class Loaded(Protocol):
    """A loaded model: the cost of its forwards, and the engine's statistics."""

    @property
    def cost(self) -> Cost: ...

    def stats(self) -> EngineStats: ...


class Way(NamedTuple):
    """A way to decode: a strategy, and its speed in calibration as a multiple of exact decoding's."""

    strategy: str
    speed: float = 1.0


@dataclass(slots=True)
class _RecentAnswers:
    """Exponentially decaying sums over the answers of one way to requests of one kind.

    ``drafting`` is in seconds. ``context``, in tokens, is a decaying mean.
    """

    answers: int = 0
    tokens: float = 0.0
    steps: float = 0.0
    rows: float = 0.0
    drafting: float = 0.0
    context: float = 0.0

    def add(self, metrics: Metrics) -> None:
        self.answers += 1
        self.tokens = _DECAY * self.tokens + metrics.completion_tokens
        self.steps = _DECAY * self.steps + metrics.steps
        self.rows = _DECAY * self.rows + metrics.rows
        self.drafting = _DECAY * self.drafting + metrics.draft_seconds
        length = metrics.prompt_tokens + metrics.completion_tokens / 2
        self.context = length if not self.context else _DECAY * self.context + (1 - _DECAY) * length


class Ways:
    """Prices of ways to decode, each in seconds per token, by kind of request.

    A way's recent answers tell how many forwards it takes per token, and how many rows each forward has. The price of
    these rows depends on the load. A request that runs alone pays for whole forwards. If it shares its forwards with
    other requests, it pays only for the time that its rows add. So few forwards with many rows may be cheapest for a
    single request and too dear under load. Until a way has given a few answers, its price follows from its speed in
    calibration. Any thread may call.
    """

    def __init__(self, model: Loaded) -> None:
        self._model, self._lock = model, Lock()
        self._recent: dict[tuple[str, str], _RecentAnswers] = {}
        self._times_passed: dict[tuple[str, str], int] = {}
        """How many times in a row each way was not chosen."""

    def learn(self, kind: str, metrics: Metrics) -> None:
        """Add a finished answer to the sums of its strategy for this kind of request."""
        if metrics.steps and metrics.completion_tokens:
            with self._lock:
                recent = self._recent.get((metrics.strategy, kind)) or _RecentAnswers()
                recent.add(metrics)
                _put_newest(self._recent, (metrics.strategy, kind), recent)

    def price(self, strategy: str, kind: str) -> float | None:
        """Return the price in seconds per token at the present load; None if the strategy has given too few answers."""
        recent = self._recent.get((strategy, kind))
        if recent is None or recent.answers < FEW:
            return None
        stats, forward, context = self._model.stats(), self._model.cost.forward, round(recent.context)
        others = stats.running + stats.waiting
        rows = max(1, round(recent.rows / recent.steps))
        added = forward(others + rows, context) - (forward(others, context) if others else 0.0)
        return (max(added, _MIN_SECONDS) * recent.steps + recent.drafting) / recent.tokens

    def cheapest(self, ways: Sequence[Way], kind: str) -> int:
        """Return the index of the cheapest of ``ways``. The first way must be exact decoding.

        A way that was not chosen `TRIAL` times in a row is returned instead.
        """
        with self._lock:
            prices = self._prices(ways, kind)
            best = min(range(len(ways)), key=prices.__getitem__)
            passed = [self._times_passed.get((way.strategy, kind), 0) for way in ways]
            if max(passed) >= TRIAL:
                best = passed.index(max(passed))
            for number, way in enumerate(ways):
                _put_newest(self._times_passed, (way.strategy, kind), 0 if number == best else passed[number] + 1)
        return best

    def _prices(self, ways: Sequence[Way], kind: str) -> list[float]:
        """Return the price of each way.

        A known price times the way's calibrated speed estimates exact decoding's price. The mean of these estimates,
        divided by its own calibrated speed, is the price of a way with too few answers.
        """
        known = [self.price(way.strategy, kind) for way in ways]
        exact_prices = [price * way.speed for price, way in zip(known, ways, strict=True) if price is not None]
        exact = sum(exact_prices) / len(exact_prices) if exact_prices else 1.0
        return [exact / way.speed if price is None else price for price, way in zip(known, ways, strict=True)]


def _put_newest(known: dict[tuple[str, str], V], key: tuple[str, str], value: V) -> None:
    """Store the value as the newest entry of ``known``, and drop its oldest one above `_MAX_PAIRS`."""
    known.pop(key, None)
    known[key] = value
    if len(known) > _MAX_PAIRS:
        known.pop(next(iter(known)))
