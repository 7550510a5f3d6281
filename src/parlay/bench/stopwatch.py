"""The stopwatch of all measurements: when tokens were emitted. Decoding lasts from the first emission to the last.

It also times other engines, in environments without Parlay's dependencies, so this module imports nothing of Parlay.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reading:
    """The tokens of one answer and when they came, in seconds from the start; None where nothing was emitted.

    ``first_tokens`` came with the first emission. ``steps`` are the forwards that committed tokens, where known.
    """

    tokens: tuple[int, ...]
    first_tokens: int
    first_seconds: float | None
    last_seconds: float | None
    steps: int = 0
    note: str = ""

    @property
    def between_seconds(self) -> float | None:
        """Mean time between tokens; None where all came at once."""
        later = len(self.tokens) - self.first_tokens
        if not later or self.first_seconds is None or self.last_seconds is None:
            return None
        return (self.last_seconds - self.first_seconds) / later


@dataclass(slots=True)
class Stopwatch:
    """Notes when the tokens of each request are emitted. It runs from when it is made."""

    began: float = field(default_factory=time.perf_counter)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    first: dict[str, tuple[float, int]] = field(default_factory=dict)
    """When the first tokens of a request came, and how many."""
    last: dict[str, float] = field(default_factory=dict)
    emissions: int = 0
    at_once: int = 0
    """Tokens of the first emission of all: no decoding time precedes them."""

    def emit(self, tokens: Sequence[int], request: str = "") -> None:
        """Note that these tokens are emitted now."""
        if not tokens:
            return
        now = time.perf_counter() - self.began
        if not self.last:
            self.at_once = len(tokens)
        self.first.setdefault(request, (now, len(tokens)))
        self.last[request] = now
        self.tokens.setdefault(request, []).extend(tokens)
        self.emissions += 1

    @property
    def decode_tokens(self) -> int:
        """Tokens of all requests after the first emission."""
        return sum(map(len, self.tokens.values())) - self.at_once

    @property
    def decode_seconds(self) -> float:
        """From the first emission of any request to the last."""
        return max(self.last.values()) - min(at for at, _ in self.first.values()) if self.last else 0.0

    def read(self, request: str = "", *, steps: int = 0, note: str = "") -> Reading:
        """One request's answer and its times."""
        at, count = self.first.get(request, (None, 0))
        return Reading(tuple(self.tokens.get(request, ())), count, at, self.last.get(request), steps, note)
