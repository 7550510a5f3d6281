"""Limits how much of long texts a drafter indexes per step, so that no step waits for a long prompt or document."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.drafters.state_room import StateRoom

STEP_TOKENS = 2048
"""Tokens that a drafter indexes per step: 10 ms at most."""
_GROWTH = 32
"""Tokens that each sequence may index in any step, which is more than it commits."""


class StepBudget:
    """Divides `STEP_TOKENS` among the sequences of a step. Tokens that one leaves go to later ones.

    A text is indexed only if ``room`` has ``token_bytes`` for each token, or it has grown by few tokens.
    """

    def __init__(self, room: StateRoom, token_bytes: int) -> None:
        self._room, self._token_bytes = room, token_bytes
        self._left = self._share = self._waiting = 0

    def begin(self, budgets: Sequence[int]) -> None:
        """Begin a step in which the sequences with a budget draft."""
        self._waiting = sum([budget > 0 for budget in budgets])
        self._left, self._share = STEP_TOKENS, STEP_TOKENS // max(1, self._waiting)

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
        """Note that the next sequence indexes nothing, so later ones get its share."""
        self._waiting -= 1

    def take_whole(self, wanted: int) -> bool:
        """Whether a text of ``wanted`` tokens may be indexed at once. The first one of a step may have any size."""
        granted = (wanted <= self._left or self._left == STEP_TOKENS) and self.has_room(wanted)
        if granted:
            self._left -= wanted
        return granted

    def has_room(self, wanted: int) -> bool:
        """Whether there is memory to index a text of ``wanted`` tokens."""
        return wanted <= _GROWTH or self._room.make(wanted * self._token_bytes)
