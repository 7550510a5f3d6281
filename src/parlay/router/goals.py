"""The goal of a router, how much it may spend on trials, and its power limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from parlay.router.ledger import GROWTH, TRIALS
from parlay.types import PowerModel


class Goal(Protocol):
    """Defines what the router maximises over a step.

    ``rows``: rows of a plain step, each of which commits a token. ``worth``: summed over the step's drafts. ``passes``:
    after so many passes from plain decoding's rate, the rate of a small batch is close to the best. ``in_joules``:
    whether the cost of a step is energy instead of time.
    """

    @property
    def in_joules(self) -> bool: ...

    @property
    def passes(self) -> int: ...

    def worth(self, gain: float) -> float:
        """The worth of a draft, given the tokens that it brings its sequence."""
        ...

    def shares(self, path_probs: list[float]) -> list[float]:
        """How much each node adds to the worth of a draft, if all likelier nodes are verified too."""
        ...

    def rate(self, rows: int, worth: float, seconds: float) -> float:
        """How much worth must make up for one more second of a step."""
        ...

    def tokens(self, rows: int, worth: float) -> float:
        """The value of a step, in tokens. Of two steps, the one with more value per second is better."""
        ...


class Throughput:
    """Tokens per second of the whole batch (goodput, arXiv:2406.14066)."""

    passes = 2
    in_joules = False

    def worth(self, gain: float) -> float:
        return gain

    def shares(self, path_probs: list[float]) -> list[float]:
        return path_probs

    def rate(self, rows: int, worth: float, seconds: float) -> float:
        return (rows + worth) / seconds

    def tokens(self, rows: int, worth: float) -> float:
        return rows + worth


class Energy(Throughput):
    """Tokens per joule of the whole batch."""

    in_joules = True


class Latency:
    """Seconds per token, averaged over sequences: minimises T (1/n1 + 1/n2 + ...) for a step of T seconds.

    A draft that gives a sequence n tokens instead of one is worth 1 - 1/n. So no draft, however long, is worth more
    than one token of each other sequence, and a step is not made longer for all where that helps only a few. Over
    whole requests `Throughput` has the better mean, as requests that draft leave sooner; this protects the slowest.
    """

    passes = 5
    in_joules = False

    def worth(self, gain: float) -> float:
        return gain / (1 + gain)

    def shares(self, path_probs: list[float]) -> list[float]:
        shares = [0.0] * len(path_probs)
        tokens = 1.0
        for node in sorted(range(len(path_probs)), key=path_probs.__getitem__, reverse=True):
            before, tokens = tokens, tokens + path_probs[node]
            shares[node] = path_probs[node] / (before * tokens)
        return shares

    def rate(self, rows: int, worth: float, seconds: float) -> float:
        return (rows - worth) / seconds

    def tokens(self, rows: int, worth: float) -> float:
        return rows**2 / (rows - worth)


THROUGHPUT = Throughput()
GOALS: Mapping[str, Goal] = MappingProxyType({"throughput": THROUGHPUT, "latency": Latency(), "energy": Energy()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much the router spends on trying drafters.

    ``trials``: the share of the decoding time that trials may lose. ``growth``: the factor by which each losing trial
    lengthens the wait for the next. ``price``: a factor on the cost of drafts. ``size``: a factor on the most nodes
    that a drafter is asked for, unless the user set them.
    """

    trials: float
    growth: float = GROWTH
    price: float = 1.0
    size: float = 1.0


MEDIUM = Effort(trials=TRIALS)
EFFORTS: Mapping[str, Effort] = MappingProxyType(
    {
        "low": Effort(trials=0.0, price=1.5, size=0.5),
        "medium": MEDIUM,
        "high": Effort(trials=3 * TRIALS, growth=1.25, size=2.0),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """A router's goal, effort and power limit.

    ``power``: what the machine draws; None if neither the goal nor a limit needs it. ``most_watts``: no draft is
    verified in a step whose mean power would exceed it; 0: no limit.
    """

    goal: Goal = THROUGHPUT
    effort: Effort = MEDIUM
    power: PowerModel | None = None
    most_watts: float = 0.0

    def __post_init__(self) -> None:
        if self.power is None and (self.goal.in_joules or self.most_watts):
            raise ValueError("what the machine draws must be known")

    @property
    def row_seconds(self) -> float:
        """Extra seconds that a row counts for under a goal in joules: in them the machine draws the row's energy."""
        return self.power.row_joules / self.power.watts if self.power is not None and self.goal.in_joules else 0.0

    def allows(self, rows: int, seconds: float) -> bool:
        """Whether a forward of these rows and seconds stays within the power limit."""
        return self.power is None or not self.most_watts or self.power.mean(rows, seconds) <= self.most_watts


USUAL = Aim()
