"""Computes the figures of a simulated fleet: throughput, latencies, utilisation, money and energy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parlay.simulate.fleet import Outcome
from parlay.types import PowerModel

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of the requests' times, and their mean, in seconds."""

    p50: float
    p90: float
    p99: float
    mean: float


@dataclass(frozen=True, slots=True)
class Goals:
    """Limits in seconds: until a request's ``first`` token, and ``per_token`` for each later token. None: no limit."""

    first: float | None = None
    per_token: float | None = None

    @property
    def any(self) -> bool:
        """Whether there is a limit."""
        return self.first is not None or self.per_token is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of one replica: dollars per ``hour``, ``power`` while it decodes, and ``idle_watts`` while it does not.

    None means that a price is not known.
    """

    hour: float | None = None
    power: PowerModel | None = None
    idle_watts: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A fleet's figures.

    ``first_token``, ``per_token`` and ``whole`` are requests' times until the first token, for each later token, and
    until the last. ``utilisation`` is the share of paid time in which servers computed. ``batch_rows`` is the mean
    number of rows of a step. ``in_time`` is the share of all requests that met the goals, and ``found`` the share of
    prompt tokens that were cached. ``joules`` are modelled, not measured. None means that a figure is not known.
    """

    requests: int
    unfinished: int
    seconds: float
    requests_per_second: float
    tokens_per_second: float
    first_token: Percentiles | None
    per_token: Percentiles | None
    whole: Percentiles | None
    utilisation: float
    batch_rows: float
    mean_replicas: float
    most_replicas: int
    in_time: float | None
    found: float
    preemptions: int
    deaths: int
    failed_over: int
    lost_tokens: int
    dollars: float | None
    tokens_per_dollar: float | None
    joules: float | None
    joules_per_token: float | None
    unfinished_after: float = 0.0
    backlog: float = 0.0


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """Return the percentiles of the values, by the nearest-rank method; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p99 = (ordered[-(-percent * len(ordered) // 100) - 1] for percent in (50, 90, 99))
    return Percentiles(p50, p90, p99, sum(ordered) / len(ordered))


def figures(outcome: Outcome, goals: Goals = Goals(), prices: Prices = Prices()) -> Figures:
    """Return the figures of a simulation's outcome."""
    span = max(outcome.span, 1e-9)
    dollars = None if prices.hour is None else prices.hour * outcome.paid / HOUR
    joules = _joules(outcome, prices)
    return Figures(
        requests=outcome.requests,
        unfinished=outcome.requests - outcome.finished,
        seconds=outcome.span,
        requests_per_second=outcome.finished / span,
        tokens_per_second=outcome.tokens / span,
        first_token=percentiles(outcome.first),
        per_token=percentiles([each for each in outcome.per_token if each >= 0]),
        whole=percentiles(outcome.whole),
        utilisation=outcome.busy / outcome.paid if outcome.paid else 0.0,
        batch_rows=outcome.rows / outcome.steps if outcome.steps else 0.0,
        mean_replicas=outcome.paid / span,
        most_replicas=outcome.most_replicas,
        in_time=_in_time(outcome, goals) if goals.any else None,
        found=outcome.found / outcome.asked if outcome.asked else 0.0,
        preemptions=outcome.preemptions,
        deaths=outcome.deaths,
        failed_over=outcome.failed_over,
        lost_tokens=outcome.lost,
        dollars=dollars,
        tokens_per_dollar=outcome.tokens / dollars if dollars else None,
        joules=joules,
        joules_per_token=joules / outcome.tokens if joules is not None and outcome.tokens else None,
        unfinished_after=outcome.unfinished_after,
        backlog=outcome.backlog,
    )


def _in_time(outcome: Outcome, goals: Goals) -> float:
    """Return the share of all requests that met the goals. Requests that never finished did not meet them."""
    first = goals.first if goals.first is not None else float("inf")
    later = goals.per_token if goals.per_token is not None else float("inf")
    met = sum(a <= first and b <= later for a, b in zip(outcome.first, outcome.per_token, strict=True))
    return met / outcome.requests


def _joules(outcome: Outcome, prices: Prices) -> float | None:
    if prices.power is None:
        return None
    idle = max(0.0, outcome.paid - outcome.busy)
    return prices.power.watts * outcome.busy + prices.power.row_joules * outcome.rows + prices.idle_watts * idle
