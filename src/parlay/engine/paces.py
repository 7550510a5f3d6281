"""What the streams of an owner take per token: alone, as was seen lately, and beside other owners."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

_KEPT = 4096
"""Owners that are remembered, those seen last: more than have something running at once."""
_DECAY, _DECAY_BESIDE = 0.95, 0.995
"""Per step alone, of the weight of earlier ones; a step alone while others run tells less, for they slow it all the
same: their requests are read and their answers written meanwhile."""
_TRIAL = 32
"""Shared steps after which one owner has a step alone, for its pace may have changed."""
_ROW = 8
"""Most steps alone one after the other: then the others have their turn, whatever they cost."""
_PART = 0.7
"""Of the seconds that a token may take beside others: the rest is for what surrounds steps."""
_MOST_BEHIND = 64
"""In tokens alone; so that one slow step is not made good for long."""


@dataclass(slots=True)
class _Pace:
    """Decayed seconds and tokens of steps alone; the seconds that shared steps took too long, not made good yet; how
    many steps were shared since the last one alone, or alone since the last one shared."""

    seconds: float
    tokens: float = 1.0
    behind: float = 0.0
    shared: int = 0
    row: int = 0


class Paces:
    """Says which owner has taken longer beside others than its fair share of the time allows.

    With n owners a token of each may take n times as long as alone. What a step takes beyond that is the owner's to
    make good, in steps alone: so whatever others' rows cost, and however many tokens drafts bring when nobody disturbs,
    the mean holds.
    """

    def __init__(self) -> None:
        self._paces: OrderedDict[str, _Pace] = OrderedDict()

    def know(self, owner: str, usual: float) -> None:
        """An owner has streams in the next step. ``usual``: seconds of a step alone, while none was seen."""
        if owner not in self._paces:
            self._paces[owner] = _Pace(usual)
            if len(self._paces) > _KEPT:
                self._paces.popitem(last=False)
        self._paces.move_to_end(owner)

    def learn(self, owner: str, seconds: float, tokens: float, *, owners: int, alone: bool) -> None:
        """A step brought each stream of the owner so many tokens, while so many owners had something running.

        ``alone``: it ran nothing but these streams.
        """
        pace = self._paces[owner]
        if owners > 1:
            token = pace.seconds / pace.tokens
            behind = pace.behind + seconds - _PART * owners * tokens * token
            pace.behind = min(max(0.0, behind), _MOST_BEHIND * token)
        pace.shared, pace.row = (0, pace.row + 1) if alone else (pace.shared + 1, 0)
        if alone and tokens:
            decay = _DECAY_BESIDE if owners > 1 else _DECAY
            pace.seconds, pace.tokens = pace.seconds * decay + seconds, pace.tokens * decay + tokens

    def first(self, owners: Iterable[str]) -> str | None:
        """Who of these has the next step alone: the one furthest behind, or one whose pace was not seen for long."""
        known = [(owner, self._paces[owner]) for owner in owners]
        if any(pace.row >= _ROW for _, pace in known):
            return None
        late = max(known, key=lambda entry: entry[1].behind, default=None)
        if late is not None and late[1].behind > 0:
            return late[0]
        unseen = max(known, key=lambda entry: entry[1].shared, default=None)
        return unseen[0] if unseen is not None and unseen[1].shared >= _TRIAL * len(known) else None
