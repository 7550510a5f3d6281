"""A predicted text: finds how far the output has come in it, letter by letter, and which tokens come next."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from parlay.drafters.copying.alignment import LOST
from parlay.drafters.other_vocabularies.letters import Letters, readable
from parlay.drafters.other_vocabularies.vocabularies import Codec, continuation

TOKEN_BYTES = 80
"""Bytes per token of a predicted text: 31 were measured in code and 76 for random ids."""

_BLANK = " \t\r\n"  # characters that do not identify a place
_LENGTHS = (1, 2, 4, 8)  # how many tokens' letters are searched for
_ANYWHERE = 2  # matches of this many tokens count anywhere, shorter ones only near the break
_NEAR = 8  # tokens' worth of letters
_LINES = 64  # lines examined for one with equal indentation
_SURE = 3  # tokens' worth of letters that must agree before a place is more than a coincidence
_TRUST = 8  # trust in a prediction at first, in matching tokens
_SEAM = 6  # tokens that are retokenised if a place lies within a token


class PredictionPlace(NamedTuple):
    """The output's place in the predicted text after one of its tokens, in letters."""

    place: int
    """How many letters precede what should come next, or `LOST`."""
    run: int
    """How many letters up to here agree; 0: the place is a guess."""
    anchor: int
    """The last place that was sure."""


class PredictedText:
    """A predicted text, shared by all samples that have it. Texts are compared by letters, not by tokens."""

    def __init__(self, ids: Sequence[int], letters: Letters) -> None:
        pieces = [letters.of(token) for token in ids]
        self._letters = letters
        self._ids = ids
        self._text = "".join(pieces)
        self._cuts = [0, *accumulate(map(len, pieces))]
        self._scale = max(1, round(len(self._text) / max(1, len(pieces))))  # letters per token

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def beginning(self) -> PredictionPlace:
        """The place before the first token of output."""
        return PredictionPlace(0, _TRUST * self._scale, 0)

    def tokens_agreed(self, spot: PredictionPlace) -> int:
        """About how many tokens before the place agree with the output."""
        return spot.run // self._scale

    def is_sure(self, spot: PredictionPlace) -> bool:
        return spot.place != LOST and spot.run >= _SURE * self._scale

    def after(self, spot: PredictionPlace, tokens: Sequence[int], at: int, *, begin: int) -> PredictionPlace:
        """The place after ``tokens[at]``, if ``spot`` was the place before it.

        The output begins with ``tokens[begin]``.
        """
        new = self._letters.of(tokens[at])
        place = spot.place + len(new)
        agrees = spot.place != LOST and self._text.startswith(new, spot.place)
        if agrees and self._is_cut(place):
            return self._at(place, spot.run + len(new), spot.anchor)
        latest = [self._letters.of(token) for token in tokens[max(begin, at + 1 - _LENGTHS[-1]) : at + 1]]
        if agrees:  # the token ends within a predicted one, which suggests another text
            return self._new_line(latest, spot.anchor) or self._at(place, min(spot.run, self._scale), spot.anchor)
        return self._found(latest, spot.anchor) or self._guess(spot, latest)

    def _at(self, place: int, run: int, anchor: int) -> PredictionPlace:
        return PredictionPlace(place, run, place if run >= _SURE * self._scale else anchor)

    def _is_cut(self, place: int) -> bool:
        return self._cuts[bisect_left(self._cuts, place)] == place

    def _found(self, latest: Sequence[str], anchor: int) -> PredictionPlace | None:
        """The place after the longest suffix of ``latest`` that occurs: next after ``anchor``, or last before it."""
        found: PredictionPlace | None = None
        for length in _LENGTHS[: bisect_right(_LENGTHS, len(latest))]:
            wanted = "".join(latest[-length:])
            place = self._nearest(wanted, anchor, anywhere=length >= _ANYWHERE)
            if place == LOST and length >= _ANYWHERE:
                break
            if place != LOST and (length >= _SURE or latest[-1].strip(_BLANK)):
                found = self._at(place, length * self._scale, anchor)
        return found

    def _nearest(self, wanted: str, anchor: int, *, anywhere: bool) -> int:
        """The place after the nearest match of ``wanted``.

        A match that may only be nearby must consist of whole tokens.
        """
        text = self._text
        far = len(text) if anywhere else anchor + _NEAR * self._scale
        start = text.find(wanted, max(0, anchor - len(wanted)), far)
        while start >= 0 and not anywhere and not self._is_cut(start):
            start = text.find(wanted, start + 1, far)
        if start < 0 and anywhere:
            start = text.rfind(wanted, 0, anchor)
        return start + len(wanted) if start >= 0 else LOST

    def _guess(self, spot: PredictionPlace, latest: Sequence[str]) -> PredictionPlace:
        """Guess the place: the first different token replaces a predicted one, a new line precedes a predicted one."""
        line = None if self.is_sure(spot) else self._new_line(latest, spot.anchor)
        if line is not None:
            return line
        place = LOST
        if spot.place != LOST and spot.run > 0:
            place = self._cuts[min(bisect_right(self._cuts, spot.place), len(self._cuts) - 1)]
        return PredictionPlace(place, 0, spot.anchor)

    def _new_line(self, latest: Sequence[str], anchor: int) -> PredictionPlace | None:
        """If the output has just begun a line, the place of the next predicted line with equal indentation."""
        wanted = latest[-1]
        if not wanted.startswith("\n") or wanted.strip(_BLANK):
            return None
        start = max(0, anchor - len(wanted)) - 1
        for _ in range(_LINES):
            start = self._text.find(wanted, start + 1)
            if start < 0:
                break
            if self._is_cut(start) and self._is_cut(start + len(wanted)):
                return PredictionPlace(start + len(wanted), 0, anchor)
        return None

    def continuation(self, place: int, tokens: Sequence[int], count: int, codec: Codec | None) -> Sequence[int]:
        """Up to ``count`` tokens that continue from ``place``, which the output ``tokens`` has reached.

        If the place lies within a predicted token, the text from there is retokenised until both tokenisations agree.
        """
        at = bisect_left(self._cuts, place)
        if self._cuts[at] == place:
            return self._ids[at : at + count]
        bridge, at = self._bridge(place, tokens, at, codec)
        return (*bridge, *self._ids[at : at + count])[:count]

    def _bridge(self, place: int, tokens: Sequence[int], at: int, codec: Codec | None) -> tuple[list[int], int]:
        """Tokens from ``place`` to a token boundary, and the next token's number; past the end if there is none."""
        bridge: list[int] = []
        if codec is not None:
            rest = readable(self._text[place : self._cuts[min(at + _SEAM, len(self._ids))]])
            for token in continuation(codec, tokens, rest, _SEAM).ids if rest else ():
                new = self._letters.of(token)
                if not new or not self._text.startswith(new, place):
                    break
                bridge.append(token)
                place += len(new)
                at = bisect_left(self._cuts, place)
                if self._cuts[at] == place:
                    return bridge, at
        return bridge, len(self._ids)
