"""Verbatim loops: small models repeat themselves under greedy decoding, which flatters every drafter that copies.

A token is looped when it lies in a run of ``length`` or more tokens that occurs earlier in the same output. Copies of
the prompt are no loops: they are what the request asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

LENGTH = 16
FEWEST_TOKENS = 16
"""A text whose first loop begins before this many tokens is too short to time."""


def first_loop(output: Sequence[int], length: int = LENGTH) -> int:
    """How many tokens come before the first looped one; all of them when nothing repeats."""
    return next(_repeats(output, length), len(output))


def lasts(output: Sequence[int]) -> bool:
    """Whether enough tokens to time come before the first loop. A text without a loop may be shorter."""
    return first_loop(output) >= min(FEWEST_TOKENS, len(output))


def looped(output: Sequence[int], length: int = LENGTH) -> float:
    """Share of the output that is looped, in [0, 1]."""
    inside = {token for start in _repeats(output, length) for token in range(start, start + length)}
    return len(inside) / len(output) if output else 0.0


def _repeats(output: Sequence[int], length: int) -> Iterator[int]:
    """Where runs of ``length`` tokens begin that occurred before, overlapping or not."""
    seen: set[tuple[int, ...]] = set()
    for start in range(len(output) - length + 1):
        run = tuple(output[start : start + length])
        if run in seen:
            yield start
        seen.add(run)
