"""Counts the bytes that drafters keep for requests under way, with one limit for all drafters of an LLM."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar
from weakref import ref

_State = TypeVar("_State")

MOST_BYTES = 200_000_000
"""The most bytes for all drafters together, if the memory budget has so many."""


class MemoryBudget(Protocol):
    """The byte budget of an LLM's caches, of which drafters' states take a part; see `parlay.cache.budget.Budget`."""

    def join(self, holder: StateRoom, share: int, least: int) -> None: ...
    def free_bytes(self, taker: StateRoom) -> int: ...
    def make_room(self, size: int, taker: StateRoom) -> bool: ...


class StateRoom:
    """The part of the memory budget that drafters' states take.

    If it is full, drafters take in no more of a prompt, which costs drafts but does not change texts. Outputs are still
    taken in, so ``nbytes`` may exceed the limit a little. If the target's cache needs memory, drafters forget their
    largest states, and build them again when there is room.
    """

    def __init__(self, budget: MemoryBudget | None = None, most: int = MOST_BYTES) -> None:
        self.most = most
        self._counted: tuple[ref[StateBytes[Any]], ...] = ()  # replaced as a whole, because other threads read it
        self._joining = threading.Lock()
        self._budget = budget
        if budget is not None:
            budget.join(self, most, 0)

    def join(self, counted: StateBytes[Any]) -> None:
        """Count these states, too, as long as their drafter exists. Any thread may call this."""
        with self._joining:
            self._counted = (*(each for each in self._counted if each() is not None), ref(counted))

    @property
    def nbytes(self) -> int:
        """Bytes of all states. Any thread may call this."""
        return sum([counted.nbytes for counted in self._living()])

    @property
    def spare(self) -> int:
        return 0

    @property
    def left(self) -> int:
        """Bytes that may be added; below 0 if outputs have exceeded the limit."""
        left = self.most - self.nbytes
        return left if self._budget is None else min(left, self._budget.free_bytes(self))

    def make(self, size: int) -> bool:
        """Make room for ``size`` more bytes, if need be by dropping cached texts that nobody uses.

        False if impossible.
        """
        return size <= self.left and (self._budget is None or self._budget.make_room(size, self))

    def drop_spare(self) -> bool:
        return False

    def drop_used(self) -> bool:
        """Let a drafter forget the largest state. False if there is none."""
        largest = max(self._living(), key=lambda counted: counted.nbytes, default=None)
        return largest is not None and largest.forget_largest()

    def _living(self) -> list[StateBytes[Any]]:
        return [counted for each in self._counted if (counted := each()) is not None]


class StateBytes(Generic[_State]):
    """The bytes of each state of one drafter, by sequence or another number."""

    def __init__(
        self, room: StateRoom, states: dict[int, _State], dropped: Callable[[_State], object] | None = None
    ) -> None:
        """``states``: the drafter's states, each of which it can build again from the sequence's tokens.

        ``dropped`` is called with each state that is removed here. It must not refer to the drafter, because that would
        be a cycle, which only the garbage collector frees.
        """
        self.room, self.nbytes = room, 0
        self._sizes: dict[int, int] = {}
        self._states, self._dropped = states, dropped
        room.join(self)

    def set(self, number: int, size: int) -> None:
        """Set the bytes of the state with this number."""
        self.nbytes += size - self._sizes.get(number, 0)
        self._sizes[number] = size

    def admit(self, number: int, size: int) -> bool:
        """Count a state of ``size`` bytes. False if it is a new one and there is no room."""
        admitted = number in self._sizes or self.room.make(size)
        if admitted:
            self.set(number, size)
        return admitted

    def release(self, number: int) -> None:
        """Forget a state that is gone. Unknown numbers are ignored."""
        self.nbytes -= self._sizes.pop(number, 0)

    def forget_largest(self) -> bool:
        """Remove the drafter's largest state. False if there is none."""
        number = max(self._sizes, key=lambda each: self._sizes[each], default=None)
        if number is None or not self.nbytes:
            return False
        self.release(number)
        state = self._states.pop(number, None)
        if state is not None and self._dropped is not None:
            self._dropped(state)
        return True


def most_tenants(tokens: int) -> int:
    """The most tenants of a store of ``tokens`` tokens. An empty automaton takes as much memory as 20 tokens."""
    return max(64, tokens // 64)
