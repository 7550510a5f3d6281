"""Measures seconds per token of each owner's streams, in steps alone and in steps shared with other owners."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

_MOST_OWNERS = 4096
"""How many owners are remembered, the latest ones: more than can run at once."""
_DECAY, _DECAY_BESIDE = 0.95, 0.995
"""Decay per step of what earlier steps alone took. It is slower while other owners' requests are running, because
reading them and writing their answers slows a step alone as well."""
_TRIAL = 32
"""Shared steps after which an owner gets a step alone, because its speed may have changed."""
_ROW = 8
"""The most steps alone in a row; then the other owners get a step."""
_PART = 0.7
"""Share of the allowed seconds per token that steps may take; the rest is for work between steps."""
_MOST_BEHIND = 64
"""The most that an owner can be owed, in tokens decoded alone, so that one slow step is not repaid for long."""


@dataclass(slots=True)
class _Pace:
    """``seconds`` and ``tokens`` of steps alone, with decay, and what the owner is owed.

    ``behind``: seconds by which shared steps exceeded the owner's fair share, less those repaid. ``shared``: shared
    steps since the last step alone. ``row``: steps alone since the last shared step.
    """

    seconds: float
    tokens: float = 1.0
    behind: float = 0.0
    shared: int = 0
    row: int = 0


class Paces:
    """Decides which owner gets a step alone, because shared steps took longer than its fair share allows.

    With n owners, a token of each may take n times as long as alone. What a step takes beyond that is owed to the owner
    and repaid by steps alone. So the mean stays within the limit, whatever other owners' rows cost.
    """

    def __init__(self) -> None:
        self._paces: OrderedDict[str, _Pace] = OrderedDict()

    def know(self, owner: str, usual: float) -> None:
        """Register an owner with streams in the next step.

        ``usual``: expected seconds of a step alone, until one is measured.
        """
        if owner not in self._paces:
            self._paces[owner] = _Pace(usual)
            if len(self._paces) > _MOST_OWNERS:
                self._paces.popitem(last=False)
        self._paces.move_to_end(owner)

    def learn(self, owner: str, seconds: float, tokens: float, *, owners: int, alone: bool) -> None:
        """Learn from a step in which each stream of the owner gained ``tokens`` tokens.

        ``owners``: how many owners had requests running. ``alone``: the step ran only this owner's streams.
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
        """The owner that gets the next step alone: the one owed most, or one not measured for long.

        None: no owner does.
        """
        known = [(owner, self._paces[owner]) for owner in owners]
        if any(pace.row >= _ROW for _, pace in known):
            return None
        late = max(known, key=lambda entry: entry[1].behind, default=None)
        if late is not None and late[1].behind > 0:
            return late[0]
        unseen = max(known, key=lambda entry: entry[1].shared, default=None)
        return unseen[0] if unseen is not None and unseen[1].shared >= _TRIAL * len(known) else None
