"""Keys and values of all sequences in one pool of slots, whose shapes do not change from step to step.

A token lies in any slot, a mask says which slots a row sees, and a slot that somebody holds is never written again. So
rows of several sequences and of trees are rows of one forward, nothing is copied when a step begins, and what `keep`
does is to hold some slots and free the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer

LEAST_SLOTS = 512
"""Slots of a new pool. A full pool doubles."""
IDLE = 0
"""The slot to which rows write that only fill a forward up. Nobody sees it."""


class SlotLayer(StaticLayer):  # type: ignore[misc]  # transformers has no types
    """A layer's keys and values, each ``[1, H, K, D]``. Rows are written to ``slots_N`` of them."""

    def __init__(self, capacity: int) -> None:
        super().__init__(max_cache_len=capacity)
        self.max_cache_len: int = capacity
        self.slots_N = torch.tensor([IDLE])

    def lazy_initialization(self, keys_BHND: Tensor, values_BHND: Tensor) -> None:
        """Make room of the shape that the model's first rows have."""
        self.dtype, self.device = keys_BHND.dtype, keys_BHND.device
        heads = keys_BHND.shape[:2]
        self.keys = keys_BHND.new_zeros(*heads, self.max_cache_len, keys_BHND.shape[-1])
        self.values = values_BHND.new_zeros(*heads, self.max_cache_len, values_BHND.shape[-1])
        self.is_initialized = True

    def update(self, keys_BHND: Tensor, values_BHND: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write rows ``[1, H, N, D]``, and return all slots: the mask says what is seen."""
        if not self.is_initialized:
            self.lazy_initialization(keys_BHND, values_BHND)
        self.keys[:, :, self.slots_N] = keys_BHND
        self.values[:, :, self.slots_N] = values_BHND
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Nothing asks in earnest: positions and masks are given."""
        return 0

    def grow(self, capacity: int) -> None:
        """Have so many slots from now on; those there were keep what they hold."""
        if self.is_initialized:
            self.keys, self.values = _wider(self.keys, capacity), _wider(self.values, capacity)
        self.max_cache_len = capacity


def _wider(states_BHKD: Tensor, capacity: int) -> Tensor:
    batch, heads, slots, size = states_BHKD.shape
    wider_BHKD = states_BHKD.new_zeros(batch, heads, capacity, size)
    wider_BHKD[:, :, :slots] = states_BHKD
    return wider_BHKD


class SlotPool:
    """The slots of a model's layers, and how many sequences hold each."""

    def __init__(self, layers: int) -> None:
        self._layers = [SlotLayer(LEAST_SLOTS) for _ in range(layers)]
        self.cache = Cache(layers=self._layers)
        self.capacity = LEAST_SLOTS
        self._free = [slot for slot in range(LEAST_SLOTS) if slot != IDLE]
        self._holders: dict[int, int] = {}

    def take(self, count: int) -> tuple[int, ...]:
        """Hold so many free slots, the lowest there are; the pool grows where it must."""
        if count > len(self._free):
            self._grow(self.capacity + count - len(self._free))
        taken = tuple(heapq.heappop(self._free) for _ in range(count))
        self._holders |= dict.fromkeys(taken, 1)
        return taken

    def share(self, slots: Iterable[int]) -> None:
        """Hold slots once more: two sequences begin alike."""
        for slot in slots:
            self._holders[slot] += 1

    def drop(self, slots: Iterable[int]) -> None:
        """Hold slots once less; those that nobody holds are free."""
        for slot in slots:
            self._holders[slot] -= 1
            if not self._holders[slot]:
                del self._holders[slot]
                heapq.heappush(self._free, slot)

    def write_to(self, slots_N: Tensor) -> None:
        """Let the next forward write its rows to these slots."""
        for layer in self._layers:
            layer.slots_N = slots_N

    def any_size(self, mark: Callable[[Tensor, int], object]) -> None:
        """Mark how many slots there are, and how many rows are written, as what may change from call to call."""
        for layer in self._layers:
            mark(layer.keys, 2)
            mark(layer.values, 2)
            mark(layer.slots_N, 0)

    def check(self, held: Sequence[Sequence[int]]) -> None:
        """Prove that each slot is free or held by as many as ``held`` has it."""
        counts: dict[int, int] = {}
        for slots in held:
            assert len(set(slots)) == len(slots), "a sequence holds a slot twice"
            for slot in slots:
                counts[slot] = counts.get(slot, 0) + 1
        assert counts == self._holders, "slots are held by others than the sequences"
        assert sorted([IDLE, *self._free, *counts]) == list(range(self.capacity)), "slots were lost"

    def _grow(self, least: int) -> None:
        capacity = self.capacity
        while capacity < least:
            capacity *= 2
        for layer in self._layers:
            layer.grow(capacity)
        self._free.extend(range(self.capacity, capacity))  # higher than all others, so the heap stays one
        self.capacity = capacity
