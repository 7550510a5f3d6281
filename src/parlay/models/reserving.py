"""The tokens that sequences of an adapter reserved: what bounds them together, and how many are left."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from parlay.types import OutOfRoom

UNBOUNDED = 1 << 20
"""Context, in tokens, of a model that names no limit (recurrent state, or positions as distances)."""
_LEAST_CAPACITY = 1 << 16


class Reserving(Protocol):
    """A sequence, and how many tokens it has reserved."""

    reserved: int


_State = TypeVar("_State", bound=Reserving)


class ReservingRunner(Generic[_State]):
    """The base class of runners that count tokens, not bytes, because the bytes per token depend on the model."""

    def __init__(self, most: int | None, context: int) -> None:
        """``most`` tokens may be reserved; without it, four full contexts or 65,536 tokens, whichever is more."""
        self._sequences: dict[int, _State] = {}
        self._capacity = most or max(_LEAST_CAPACITY, 4 * context)

    def reserve(self, sequence: int, tokens: int) -> bool:
        """Whether there is room for so many tokens of this sequence. Raises OutOfRoom if there never will be."""
        if tokens > self._capacity:
            raise OutOfRoom(f"{tokens} tokens can't fit a cache of {self._capacity}: raise the cache size")
        state = self._sequences[sequence]
        if tokens - state.reserved > self.free_tokens():
            return False
        state.reserved = max(state.reserved, tokens)
        return True

    def free_tokens(self) -> int:
        """Count the tokens that nobody has reserved."""
        return self._capacity - sum(state.reserved for state in self._sequences.values())

    def capacity(self) -> int:
        """Count the tokens that all sequences may reserve together."""
        return self._capacity
