"""The stopwatch of all measurements, which records when tokens were emitted.

Decoding lasts from the first emission to the last. The stopwatch also times other engines, in environments without
Parlay's dependencies, so this module imports nothing of Parlay.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reading:
    """The tokens of one answer, and the seconds from the start to the first and last emission; None without any.

    The first emission had ``first_tokens`` tokens. ``steps`` counts the forwards that committed tokens; 0 if it is not
    known.
    """

    tokens: tuple[int, ...]
    first_tokens: int
    first_seconds: float | None
    last_seconds: float | None
    steps: int = 0
    note: str = ""

    @property
    def between_seconds(self) -> float | None:
        """Mean seconds between tokens; None if all tokens came in one emission."""
        later = len(self.tokens) - self.first_tokens
        if not later or self.first_seconds is None or self.last_seconds is None:
            return None
        return (self.last_seconds - self.first_seconds) / later


@dataclass(slots=True)
class Stopwatch:
    """Records when the tokens of each request are emitted, in seconds from ``began``."""

    began: float = field(default_factory=time.perf_counter)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    first: dict[str, tuple[float, int]] = field(default_factory=dict)
    """The time of each request's first emission, and its number of tokens."""
    last: dict[str, float] = field(default_factory=dict)
    emissions: int = 0
    at_once: int = 0
    """Number of tokens in the first emission of any request. Decoding time begins with it, so they do not count."""

    def emit(self, tokens: Sequence[int], request: str = "") -> None:
        """Record that these tokens are emitted now."""
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
        """Number of tokens of all requests after the first emission of any."""
        return sum(map(len, self.tokens.values())) - self.at_once

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first emission of any request to the last emission of any."""
        return max(self.last.values()) - min(at for at, _ in self.first.values()) if self.last else 0.0

    def read(self, request: str = "", *, steps: int = 0, note: str = "") -> Reading:
        """Return one request's answer and its times."""
        at, count = self.first.get(request, (None, 0))
        return Reading(tuple(self.tokens.get(request, ())), count, at, self.last.get(request), steps, note)
