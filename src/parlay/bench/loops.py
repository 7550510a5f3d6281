"""Finds verbatim loops: small models repeat themselves in greedy decoding, and drafters that copy look better for it.

A token is looped if it lies in a run of ``length`` or more tokens that occurs earlier in the same output. Copies of the
prompt are not loops, because the request asked for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

LENGTH = 16
FEWEST_TOKENS = 16
"""A text whose first loop begins before this many tokens is too short to time."""


def first_loop(output: Sequence[int], length: int = LENGTH) -> int:
    """Return the number of tokens before the first looped one. If nothing repeats, it is the number of all tokens."""
    return next(_repeats(output, length), len(output))


def lasts(output: Sequence[int]) -> bool:
    """Whether at least `FEWEST_TOKENS` tokens come before the first loop. A text without a loop may be shorter."""
    return first_loop(output) >= min(FEWEST_TOKENS, len(output))


def looped(output: Sequence[int], length: int = LENGTH) -> float:
    """Return the share of the output that is looped, in [0, 1]."""
    inside = {token for start in _repeats(output, length) for token in range(start, start + length)}
    return len(inside) / len(output) if output else 0.0


def _repeats(output: Sequence[int], length: int) -> Iterator[int]:
    """Yield the start of each run of ``length`` tokens that occurred before, even if it overlaps the earlier one."""
    seen: set[tuple[int, ...]] = set()
    for start in range(len(output) - length + 1):
        run = tuple(output[start : start + length])
        if run in seen:
            yield start
        seen.add(run)
