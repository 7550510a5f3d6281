"""How much of long texts a drafter takes in during one step, so that no step waits for a long prompt or document."""

from __future__ import annotations

from dataclasses import dataclass

STEP_TOKENS = 2048
"""Tokens that a drafter indexes in one step: 10 ms at most."""
MOST_INDEXED = 2_000_000
"""Tokens of requests under way, those of their documents among them, in the indexes of all drafters: some 200 MB."""
_GROWTH = 32
"""Tokens that each sequence may index in every step, whatever the others have left: more than it commits."""


@dataclass(slots=True)
class IndexRoom:
    """How many more tokens the drafters of one LLM may hold in indexes for the requests under way.

    Where there is no room a request's texts are not indexed further, which costs drafts and no text. Below 0: outputs
    of requests that were indexed in time go on to be.
    """

    left: int = MOST_INDEXED


class StepBudget:
    """Shares `STEP_TOKENS` among the sequences of a step. What one leaves is there for those after it.

    What the drafter's sequences hold is taken from ``room``, which drafters share.
    """

    def __init__(self, room: IndexRoom) -> None:
        self._room = room
        self._held = self._left = self._share = self._waiting = 0

    @property
    def is_short(self) -> bool:
        """Whether the room may not be enough for a step."""
        return self._room.left < STEP_TOKENS

    def begin(self, sequences: int, held: int | None = None) -> None:
        """A step in which so many sequences are asked for drafts. ``held``: tokens in indexes now; None: as counted."""
        self._left, self._share, self._waiting = STEP_TOKENS, STEP_TOKENS // max(1, sequences), sequences
        if held is not None:
            self.holds(held)

    def holds(self, tokens: int) -> None:
        """The drafter's indexes hold so many tokens now."""
        self._room.left += self._held - tokens
        self._held = tokens

    def holds_more(self, tokens: int) -> None:
        self.holds(self._held + tokens)

    def take(self, wanted: int) -> int:
        """How many of the ``wanted`` tokens the next sequence may index now."""
        self._waiting = max(0, self._waiting - 1)
        granted = min(wanted, max(_GROWTH, self._left - self._share * self._waiting))
        if wanted > _GROWTH:
            granted = min(granted, max(0, self._room.left))
        self._left -= granted
        self.holds_more(granted)
        return granted

    def skip(self) -> None:
        """The next sequence indexes nothing now: its share is there for those after it."""
        self._waiting -= 1

    def take_whole(self, wanted: int) -> bool:
        """Whether a text of so many tokens may be indexed now at one go: one of any size if it is the step's first."""
        granted = (wanted <= self._left or self._left == STEP_TOKENS) and self.has_room(wanted)
        if granted:
            self._left -= wanted
            self.holds_more(wanted)
        return granted

    def has_room(self, wanted: int) -> bool:
        """Whether a text of so many tokens may be indexed at all."""
        return wanted <= max(_GROWTH, self._room.left)
