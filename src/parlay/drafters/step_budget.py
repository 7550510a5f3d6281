"""How much of long texts a drafter takes in during one step, so that no step waits for a long prompt or document."""

from __future__ import annotations

from parlay.drafters.state_room import StateRoom

STEP_TOKENS = 2048
"""Tokens that a drafter indexes in one step: 10 ms at most."""
_GROWTH = 32
"""Tokens that each sequence may index in every step, whatever the others have left: more than it commits."""


class StepBudget:
    """Shares `STEP_TOKENS` among the sequences of a step. What one leaves is there for those after it.

    A text is indexed only as far as ``room`` has ``token_bytes`` for each token, or its size has changed by little.
    """

    def __init__(self, room: StateRoom, token_bytes: int) -> None:
        self._room, self._token_bytes = room, token_bytes
        self._left = self._share = self._waiting = 0

    def begin(self, sequences: int) -> None:
        """A step in which so many sequences are asked for drafts."""
        self._left, self._share, self._waiting = STEP_TOKENS, STEP_TOKENS // max(1, sequences), sequences

    def take(self, wanted: int) -> int:
        """How many of the ``wanted`` tokens the next sequence may index now."""
        self._waiting = max(0, self._waiting - 1)
        granted = min(wanted, max(_GROWTH, self._left - self._share * self._waiting))
        if wanted > _GROWTH:
            granted = min(granted, max(0, self._room.left) // self._token_bytes)
            granted = granted if self.has_room(granted) else 0
        self._left -= granted
        return granted

    def skip(self) -> None:
        """The next sequence indexes nothing now: its share is there for those after it."""
        self._waiting -= 1

    def take_whole(self, wanted: int) -> bool:
        """Whether a text of so many tokens may be indexed now at one go: one of any size if it is the step's first."""
        granted = (wanted <= self._left or self._left == STEP_TOKENS) and self.has_room(wanted)
        if granted:
            self._left -= wanted
        return granted

    def has_room(self, wanted: int) -> bool:
        """Whether a text of so many tokens may be indexed at all."""
        return wanted <= _GROWTH or self._room.make(wanted * self._token_bytes)
