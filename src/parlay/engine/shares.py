"""How owners share the engine: each has as much of it, however many requests it sends and how urgent it calls them.

With one owner nothing of this has any effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from parlay.engine.sequence import Sequence

ROWS = 16
"""Rows of a step for each owner while several have requests in it, and as many again for drafts: on CPUs a forward with
so many rows beside takes less than twice as long as one with a single row."""
PREFILL_ROWS = 32
"""The same for prompts."""


def first_waiting(waiting: SequenceOf[Sequence], running: Iterable[Sequence]) -> Sequence:
    """Whose turn it is to start, of ``waiting`` by rank: the first of the owner who has fewest running."""
    there = Counter(_owner(sequence) for sequence in running)
    first: dict[str, Sequence] = {}
    for sequence in waiting:
        first.setdefault(_owner(sequence), sequence)
    return min(first.values(), key=lambda sequence: there[_owner(sequence)])


def victim(running: SequenceOf[Sequence]) -> Sequence:
    """Who gives way, of ``running`` by rank: the last of the owner who has most of them."""
    there = Counter(_owner(sequence) for sequence in running)
    return max(enumerate(running), key=lambda entry: (there[_owner(entry[1])], entry[0]))[1]


def gives_way(running: SequenceOf[Sequence], newcomer: Sequence) -> bool:
    """Whether someone must give way to a newcomer whose owner has nothing running, for others have more than one."""
    there = Counter(_owner(sequence) for sequence in running)
    return there[_owner(newcomer)] == 0 and max(there.values(), default=0) > 1


class Shares:
    """Divides the rows of steps among the owners of what runs."""

    def __init__(self) -> None:
        self._step = 0
        self._left: dict[str, int] = {}
        self._prefill_left: dict[str, int] = {}
        self._served: dict[Sequence, int] = {}
        """The last step in which each sequence had a turn, while owners share."""
        self.owners = 1

    def begin(self, ordered: list[Sequence]) -> list[Sequence]:
        """The sequences in the order in which they get rows in the next step.

        Of those that decode, who waited longest goes first; prompts are fed one after the other.
        """
        self.owners = len({_owner(sequence) for sequence in ordered})
        if self.owners < 2:
            self._served.clear()
            return ordered
        self._step += 1
        self._served = {sequence: self._served.get(sequence, 0) for sequence in ordered}
        self._left = dict.fromkeys(map(_owner, ordered), ROWS)
        self._prefill_left = dict.fromkeys(map(_owner, ordered), PREFILL_ROWS)
        decoding = [sequence for sequence in ordered if _pending(sequence) <= 1]
        return sorted(decoding, key=self._served.__getitem__) + [one for one in ordered if _pending(one) > 1]

    def rows(self, sequence: Sequence, room: int) -> int:
        """How many rows the sequence may have, of ``room`` that are left in the step."""
        if self.owners < 2:
            return room
        return min(room, self._rows_left(sequence).get(_owner(sequence), PREFILL_ROWS))

    def take(self, sequence: Sequence, rows: int) -> None:
        """Note rows that a sequence has got."""
        if self.owners > 1:
            left = self._rows_left(sequence)
            left[_owner(sequence)] = left.get(_owner(sequence), PREFILL_ROWS) - rows
            self._served[sequence] = self._step

    def _rows_left(self, sequence: Sequence) -> dict[str, int]:
        return self._prefill_left if _pending(sequence) > 1 else self._left

    def draft_rows(self, limit: int) -> int:
        """How many rows of drafts the step may have."""
        return limit if self.owners < 2 else min(limit, ROWS * self.owners)


def _owner(sequence: Sequence) -> str:
    return sequence.request.owner


def _pending(sequence: Sequence) -> int:
    return len(sequence.tokens) - sequence.cached
