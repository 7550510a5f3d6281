"""Reuses cached keys at other positions: runs that a request shares with earlier texts are moved into its cache.

llama.cpp does the same (``--cache-reuse``). It is lossy, because the hidden states of moved tokens saw another text
before them. So requests that allow it share cached texts only with each other.

The first tokens of each run are computed again, because later tokens look there for what came before: the token before
the suffix of a file tells the model where the cursor is. In Qwen2.5-Coder-0.5B, a typed token before 287 tokens of
suffix changes the next token's distribution by 4.0 nats (KL divergence) if the whole run moves, by .018 if its first
token is computed again, by .006 if 8 are, and by .003 if 64 are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from parlay.engine.sequence import Sequence
from parlay.types import Move, MovingRunner

Ids = NDArray[np.int64]

_RECOMPUTED = 8
"""How many tokens at the start of each run are computed again."""

_TEXTS = 8
"""How many texts of earlier requests are searched, the newest first."""


class Moves:
    """Plans the moves of a sequence when it starts, and makes each move once the sequence is cached up to its place.

    Without a ``runner`` that can move keys, nothing is planned.
    """

    def __init__(self, runner: MovingRunner | None) -> None:
        self._runner = runner
        self._texts: deque[tuple[str, list[int]]] = deque(maxlen=_TEXTS)

    def plan(self, sequence: Sequence) -> None:
        """Find runs of the uncached tokens, long enough to be moved, in the texts of earlier requests."""
        least = sequence.request.reuse
        if self._runner is None or not least or sequence.request.params.prompt_logprobs is not None:
            return
        tokens = sequence.tokens[:-1]  # the last one's row is the root's: it has to run
        for salt, text in reversed(self._texts):
            if salt == sequence.request.salt and (runs := runs_of(tokens, text, least, sequence.cached)):
                shorter = [
                    Move(to + _RECOMPUTED, first + _RECOMPUTED, length - _RECOMPUTED) for to, first, length in runs
                ]
                sequence.moves = [move for move in shorter if move.length > 0]
                sequence.moved_text = text
                return

    def make(self, sequence: Sequence) -> None:
        """Make the moves that begin where the sequence's cached tokens end."""
        while self._runner is not None and sequence.moves and sequence.moves[0].to <= sequence.cached:
            move = sequence.moves.pop(0)
            if move.to == sequence.cached:
                before = sequence.cached
                sequence.cached = self._runner.move(sequence.sequence, sequence.moved_text, move)
                if not sequence.preempted:
                    sequence.tally.cached_tokens += sequence.cached - before

    def rows(self, sequence: Sequence, rows: int) -> int:
        """Cut ``rows`` of pending tokens where the next move begins. The sequence must have a move left."""
        return min(rows, sequence.moves[0].to - sequence.cached)

    def remember(self, sequence: Sequence) -> None:
        """Keep the text of a sequence that ends, so that later sequences can move runs out of it."""
        if self._runner is not None and sequence.request.reuse and sequence.cached:
            self._texts.append((sequence.request.salt, sequence.tokens[: sequence.cached]))


def runs_of(tokens: Seq[int], text: Seq[int], least: int, start: int) -> list[Move]:
    """Runs of at least ``least`` tokens that ``tokens[start:]`` shares with ``text``, in the order of ``tokens``."""
    ours, theirs = np.array(tokens, np.int64), np.array(text, np.int64)
    windows = _window_hashes(theirs, least)
    known = dict(
        zip(reversed(windows), reversed(range(len(windows))), strict=True)
    )  # if windows are equal, the first one counts
    wanted, found, place = _window_hashes(ours[start:], least), list[Move](), start
    while place - start < len(wanted):
        first = known.get(wanted[place - start])
        length = 0 if first is None else _shared(ours[place:], theirs[first:])
        if first is None or length < least:  # different windows may have the same hash
            place += 1
            continue
        found.append(Move(place, first, length))
        place += length
    return found


_BASE = 0x9E3779B97F4A7C15
"""An odd number of 64 bits without a pattern."""


def _window_hashes(ids: Ids, length: int) -> list[int]:
    """A hash of each window of ``length`` tokens, equal for equal windows: a polynomial in 64-bit arithmetic.

    It takes a few array operations. Comparing the windows themselves held up the engine's thread for a second in long
    texts.
    """
    if len(ids) < length:
        return []
    rising, falling = (np.full(len(ids), base, np.uint64).cumprod() for base in (_BASE, pow(_BASE, -1, 1 << 64)))
    sums = np.concatenate([np.zeros(1, np.uint64), (ids.astype(np.uint64) * rising).cumsum(dtype=np.uint64)])
    numbers: list[int] = ((sums[length:] - sums[:-length]) * falling[: len(ids) - length + 1]).tolist()
    return numbers


def _shared(one: Ids, other: Ids) -> int:
    """Count the leading tokens that both arrays share."""
    count, most, more = 0, min(len(one), len(other)), 64
    while count < most:
        end = min(count + more, most)
        differing = np.flatnonzero(one[count:end] != other[count:end])
        if len(differing):
            return count + int(differing[0])
        count, more = end, 2 * more
    return most
