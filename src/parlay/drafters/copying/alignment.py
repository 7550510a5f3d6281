"""Follows an output through the source that it copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from parlay.drafters.copying.ngram_index import NgramIndex
from parlay.drafters.per_sequence import History
from parlay.types import NO_DRAFT, Draft, trees

K = TypeVar("K")

LOST = -1
_PLACE_BYTES = 200
"""Bytes per followed token of an output: 191 were measured."""
CATCH_UP = 512
"""The most output tokens followed in one step. A drafter may first be asked when a text is already long."""
_SURE = 3  # tokens that must agree before a place is more than a coincidence


class SourcePlace(NamedTuple):
    """Where the output stands in the source after one of its tokens."""

    place: int
    """Index of the source's token that should come next, or `LOST`."""
    run: int
    """How many tokens up to here are known to agree."""
    anchor: int
    """The last place that `_SURE` tokens led to."""


Reentry = Callable[[NgramIndex, Sequence[int], int], tuple[int, int]]
"""``(source, latest output, anchor) -> (place, run)``: finds where copying resumes after the output has left the
source."""


class Trail(Generic[K]):
    """Keeps a state after each token of an output, so that tokens can be taken back.

    ``step(state, tokens, at)`` returns the state after ``tokens[at]``; ``first`` is the state before the first token.
    If an output has grown by more than `CATCH_UP` tokens, only the last ones are followed, starting from the state
    ``lost``.
    """

    def __init__(self, first: K, lost: K, step: Callable[[K, Sequence[int], int], K], prompt_length: int) -> None:
        self._lost = lost
        self._step = step
        self._prompt_length = prompt_length
        self._history = History()
        self._known = [first]

    @property
    def nbytes(self) -> int:
        return len(self._known) * _PLACE_BYTES

    def follow(self, tokens: Sequence[int]) -> K:
        """The state after the output, which is the part of ``tokens`` after the prompt."""
        history, known, begin = self._history, self._known, self._prompt_length
        agreed = history.agree(tokens)
        history.cut(agreed)
        history.tokens += tokens[agreed:]
        del known[max(0, agreed - begin) + 1 :]
        start = max(agreed, begin)
        skipped = max(0, len(tokens) - start - CATCH_UP)
        known += [self._lost] * skipped
        for place in range(start + skipped, len(tokens)):
            known.append(self._step(known[-1], history.tokens, place))
        return known[-1]


class Alignment:
    """Follows an output through a source, from its beginning."""

    def __init__(self, source: NgramIndex, reenter: Reentry, prompt_length: int) -> None:
        self.source = source
        self._reenter = reenter
        self._prompt_length = prompt_length
        self._trail = Trail(SourcePlace(0, 0, 0), SourcePlace(LOST, 0, 0), self._next, prompt_length)

    @property
    def nbytes(self) -> int:
        return self._trail.nbytes

    def follow(self, tokens: Sequence[int]) -> SourcePlace:
        """The output's place in the source; the output is the part of ``tokens`` after the prompt."""
        return self._trail.follow(tokens)

    def _next(self, spot: SourcePlace, tokens: Sequence[int], at: int) -> SourcePlace:
        place, run, anchor = spot
        if place != LOST and self.source.text[place] == tokens[at]:
            place, run = place + 1, run + 1
        else:
            latest = tokens[max(self._prompt_length, at + 1 - self.source.longest) : at + 1]
            place, run = self._reenter(self.source, latest, anchor)
        return SourcePlace(place, run, place if run >= _SURE else anchor)


def chance(run: int) -> float:
    """The probability that a copy continues after ``run`` matches: .3 to .95, from summaries, answers and edits."""
    return run / (run + 1) if run > 1 else 0.3


def copied(source: NgramIndex, place: int, run: int, budget: int, name: str) -> Draft:
    """The draft ``name`` of at most ``budget`` tokens from ``place`` on, where ``run`` tokens agree; none if lost."""
    if place == LOST:
        return NO_DRAFT
    tokens = source.copy(place, budget)
    return trees.chain(tokens, name, [chance(run + depth) for depth in range(len(tokens))])
