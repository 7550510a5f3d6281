"""What a router maximises. Whatever it is, the worth of a draft is told in tokens of plain decoding."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol


class Goal(Protocol):
    """``rows`` are those of a plain step, each of which commits a token; ``worth`` is summed over the step's drafts.

    ``passes``: after so many the rate of a small batch, which begins at plain decoding's, is close to the best.
    ``in_joules``: whether what a step costs is its energy, and not its time.
    """

    @property
    def in_joules(self) -> bool: ...

    @property
    def passes(self) -> int: ...

    def worth(self, gain: float) -> float:
        """Of a draft that brings one sequence so many tokens."""
        ...

    def shares(self, path_probs: list[float]) -> list[float]:
        """What each node of a draft adds to its worth, if all likelier ones are verified too."""
        ...

    def rate(self, rows: int, worth: float, seconds: float) -> float:
        """The worth that must make up for one more second of a step."""
        ...

    def tokens(self, rows: int, worth: float) -> float:
        """What a step counts for: of two steps the better one has more of it per second."""
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
    """Seconds per token, in the mean over sequences: T (1/n1 + 1/n2 + ...) for a step of T seconds is to be small.

    A sequence that gets n tokens instead of one is worth 1 - 1/n. So no draft, however long, is worth more than one
    token of every other sequence, and a step is not made longer for all where that helps a few.
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
