"""Count the bytes that drafters keep of requests under way: one bound for all drafters of an LLM."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar
from weakref import ref

_State = TypeVar("_State")

MOST_BYTES = 200_000_000
"""Of all drafters together, where the budget has so many."""


class MemoryBudget(Protocol):
    """The bytes of an LLM's caches, of which states take a part; see `parlay.cache.budget.Budget`."""

    def join(self, holder: StateRoom, share: int, least: int) -> None: ...
    def free_bytes(self, taker: StateRoom) -> int: ...
    def make_room(self, size: int, taker: StateRoom) -> bool: ...


class StateRoom:
    """The part of the memory budget that drafters' states take.

    Where there is no room, a drafter takes in no more of a text, which costs drafts and no text. Outputs go on to be
    taken in, so ``held`` may pass the bound by a little. The target's cache may have all of it: then drafters forget
    the largest states first, and build them again when there is room.
    """

    def __init__(self, budget: MemoryBudget | None = None, most: int = MOST_BYTES) -> None:
        self.most = most
        self._counted: tuple[ref[StateBytes[Any]], ...] = ()  # replaced as a whole: other threads ask what is held
        self._joining = threading.Lock()
        self._budget = budget
        if budget is not None:
            budget.join(self, most, 0)

    def join(self, counted: StateBytes[Any]) -> None:
        """Count these states too, for as long as their drafter is there. Any thread may call this."""
        with self._joining:
            self._counted = (*(each for each in self._counted if each() is not None), ref(counted))

    @property
    def held(self) -> int:
        """Bytes of all states. Any thread may ask."""
        return sum([counted.held for counted in self._living()])

    @property
    def spare(self) -> int:
        return 0

    @property
    def left(self) -> int:
        """Bytes that states may take in addition; below 0 where outputs have passed the bound."""
        left = self.most - self.held
        return left if self._budget is None else min(left, self._budget.free_bytes(self))

    def make(self, size: int) -> bool:
        """Whether there is room for so many more bytes. Cached texts that nobody uses give way to them."""
        return size <= self.left and (self._budget is None or self._budget.make_room(size, self))

    def drop_spare(self) -> bool:
        return False

    def drop_used(self) -> bool:
        """Have a drafter forget the state that takes most. False if none takes anything."""
        largest = max(self._living(), key=lambda counted: counted.held, default=None)
        return largest is not None and largest.forget_largest()

    def _living(self) -> list[StateBytes[Any]]:
        return [counted for each in self._counted if (counted := each()) is not None]


class StateBytes(Generic[_State]):
    """The bytes of each state of one drafter, by sequence or another number."""

    def __init__(
        self, room: StateRoom, states: dict[int, _State], dropped: Callable[[_State], object] | None = None
    ) -> None:
        """``states`` are those of the drafter, which can build each again from the sequence's tokens.

        ``dropped`` hears of each that the room takes out of them. It must not refer to the drafter, which would then
        refer to itself and wait for the garbage collector.
        """
        self.room, self.held = room, 0
        self._sizes: dict[int, int] = {}
        self._states, self._dropped = states, dropped
        room.join(self)

    def set(self, number: int, size: int) -> None:
        """The state of this number takes so many bytes now."""
        self.held += size - self._sizes.get(number, 0)
        self._sizes[number] = size

    def admit(self, number: int, size: int) -> bool:
        """Count a state of so many bytes. False if it is a new one for which there is no room."""
        admitted = number in self._sizes or self.room.make(size)
        if admitted:
            self.set(number, size)
        return admitted

    def release(self, number: int) -> None:
        """The state is gone. Unknown numbers are ignored."""
        self.held -= self._sizes.pop(number, 0)

    def forget_largest(self) -> bool:
        """Have the drafter forget its largest state. False if no state takes anything."""
        number = max(self._sizes, key=lambda each: self._sizes[each], default=None)
        if number is None or not self.held:
            return False
        self.release(number)
        state = self._states.pop(number, None)
        if state is not None and self._dropped is not None:
            self._dropped(state)
        return True


def most_tenants(tokens: int) -> int:
    """How many tenants may share a store of so many tokens: an empty automaton takes as much as 20 tokens."""
    return max(64, tokens // 64)
