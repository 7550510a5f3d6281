"""The goal of a router, how hard it tries, and below which power."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from parlay.router.ledger import GROWTH, TRIALS
from parlay.types import PowerModel


class Goal(Protocol):
    """``rows`` are those of a plain step, each of which commits a token; ``worth`` is summed over the step's drafts.

    ``passes``: after so many the rate of a small batch, which begins at plain decoding's, is close to the best.
    ``in_joules``: whether what a step costs is its energy, and not its time.
    """

    @property
    def in_joules(self) -> bool: ...

    @property
    def passes(self) -> int: ...

    def worths(self, gains: list[float]) -> list[float]:
        """Worth of each of several drafts, by the tokens that it brings its sequence."""
        ...

    def shares(self, path_probs: list[float]) -> list[float]:
        """Share of each node in the worth of a draft, if all likelier ones are verified too."""
        ...

    def rate(self, rows: int, worth: float, seconds: float) -> float:
        """The worth that must make up for one more second of a step."""
        ...

    def tokens(self, rows: int, worths: list[float]) -> list[float]:
        """Values of steps in tokens: of two steps the better one has more of it per second."""
        ...


class Throughput:
    """Tokens per second of the whole batch (goodput, arXiv:2406.14066)."""

    passes = 2
    in_joules = False

    def worths(self, gains: list[float]) -> list[float]:
        return gains

    def shares(self, path_probs: list[float]) -> list[float]:
        return path_probs

    def rate(self, rows: int, worth: float, seconds: float) -> float:
        return (rows + worth) / seconds

    def tokens(self, rows: int, worths: list[float]) -> list[float]:
        return [rows + worth for worth in worths]


class Energy(Throughput):
    """Tokens per joule of the whole batch."""

    in_joules = True


class Latency:
    """Seconds per token, in the mean over sequences: T (1/n1 + 1/n2 + ...) for a step of T seconds is to be small.

    A sequence that gets n tokens instead of one is worth 1 - 1/n. So no draft, however long, is worth more than one
    token of every other sequence, and a step is not made longer for all where that helps a few.
    """

    passes = 5
    in_joules = False

    def worths(self, gains: list[float]) -> list[float]:
        return [gain / (1 + gain) for gain in gains]

    def shares(self, path_probs: list[float]) -> list[float]:
        shares = [0.0] * len(path_probs)
        tokens = 1.0
        for node in sorted(range(len(path_probs)), key=path_probs.__getitem__, reverse=True):
            before, tokens = tokens, tokens + path_probs[node]
            shares[node] = path_probs[node] / (before * tokens)
        return shares

    def rate(self, rows: int, worth: float, seconds: float) -> float:
        return (rows - worth) / seconds

    def tokens(self, rows: int, worths: list[float]) -> list[float]:
        return [rows**2 / (rows - worth) for worth in worths]


THROUGHPUT = Throughput()
GOALS: Mapping[str, Goal] = MappingProxyType({"throughput": THROUGHPUT, "latency": Latency(), "energy": Energy()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """``trials``: the share of the decoding time that trials may lose. ``growth``: by which each that loses multiplies
    the wait for the next.

    ``price``: a factor on what drafts cost. ``size``: a factor on the most nodes that a drafter is asked for, where
    nobody has set them.
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
    """``power`` is what the machine draws; None: neither the goal nor a limit needs it.

    ``most_watts``: no draft is verified in a step that would draw more in the mean; 0: no limit.
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
        """Seconds that a row counts for beside those that it takes: in them the machine draws what the row uses."""
        return self.power.row_joules / self.power.watts if self.power is not None and self.goal.in_joules else 0.0

    def allows(self, rows: int, seconds: float) -> bool:
        """Whether a forward of so many rows and seconds stays below the limit."""
        return self.power is None or not self.most_watts or self.power.mean(rows, seconds) <= self.most_watts


USUAL = Aim()
