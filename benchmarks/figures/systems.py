"""What is compared: a named way of decoding one prompt, timed by one stopwatch whatever stands behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # peers time themselves by this stopwatch in environments without Parlay
    from benchmarks.figures.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Timed:
    """The tokens of one answer and when they came. ``steps`` are target forwards that committed, where known."""

    tokens: tuple[int, ...]
    first_tokens: int
    first_seconds: float
    decode_seconds: float
    steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    note: str = ""
    values: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class System:
    """``decode(prompt, most_tokens)`` writes greedily until the model ends the text or so many tokens are out."""

    name: str
    decode: Callable[[Prompt, int], Timed]


@dataclass(slots=True)
class Stopwatch:
    """Notes when tokens are emitted, and how often. Decoding lasts from the first emission to the last."""

    began: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    emissions: int = 0
    first_tokens: int = 0
    first: float = 0.0
    last: float = 0.0

    def emit(self, tokens: Sequence[int]) -> None:
        """These tokens are out now."""
        if not tokens:
            return
        self.last = time.perf_counter()
        self.emissions += 1
        if not self.tokens:
            self.first, self.first_tokens = self.last, len(tokens)
        self.tokens += tokens

    def read(self, *, steps: int = 0, draft_tokens: int = 0, accepted_tokens: int = 0, note: str = "") -> Timed:
        """The answer and its times."""
        return Timed(
            tuple(self.tokens),
            self.first_tokens,
            self.first - self.began,
            self.last - self.first,
            steps,
            draft_tokens,
            accepted_tokens,
            note,
        )
