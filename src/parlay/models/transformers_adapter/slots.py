"""A transformers model's pool of slots: a cache whose shapes do not change from step to step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer

from parlay.models.slots import IDLE, LEAST_SLOTS, SlotPool


class SlotLayer(StaticLayer):  # type: ignore[misc]  # transformers has no types
    """A layer's keys and values, each ``[1, H, K, D]``; rows are written to the slots ``slots_N``."""

    def __init__(self, capacity: int) -> None:
        super().__init__(max_cache_len=capacity)
        self.max_cache_len: int = capacity
        self.slots_N = torch.tensor([IDLE])

    def lazy_initialization(self, keys_BHND: Tensor, values_BHND: Tensor) -> None:
        """Allocate memory with the shape of the model's first rows."""
        self.dtype, self.device = keys_BHND.dtype, keys_BHND.device
        heads = keys_BHND.shape[:2]
        self.keys = keys_BHND.new_zeros(*heads, self.max_cache_len, keys_BHND.shape[-1])
        self.values = values_BHND.new_zeros(*heads, self.max_cache_len, values_BHND.shape[-1])
        self.is_initialized = True

    def update(self, keys_BHND: Tensor, values_BHND: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write rows ``[1, H, N, D]``, and return all slots; the mask hides those that are not seen."""
        if not self.is_initialized:
            self.lazy_initialization(keys_BHND, values_BHND)
        self.keys[:, :, self.slots_N] = keys_BHND
        self.values[:, :, self.slots_N] = values_BHND
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Always 0, as positions and masks are passed in."""
        return 0

    def grow(self, capacity: int) -> None:
        """Grow to ``capacity`` slots; existing slots keep their content."""
        if self.is_initialized:
            self.keys, self.values = _wider(self.keys, capacity), _wider(self.values, capacity)
        self.max_cache_len = capacity


def _wider(states_BHKD: Tensor, capacity: int) -> Tensor:
    batch, heads, slots, size = states_BHKD.shape
    wider_BHKD = states_BHKD.new_zeros(batch, heads, capacity, size)
    wider_BHKD[:, :, :slots] = states_BHKD
    return wider_BHKD


class TransformersPool(SlotPool):
    """The slots of a transformers model's layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self._layers = [SlotLayer(LEAST_SLOTS) for _ in range(layers)]
        self.cache = Cache(layers=self._layers)

    def grow(self, capacity: int) -> None:
        super().grow(capacity)
        for layer in self._layers:
            layer.grow(capacity)

    def write_to(self, slots_N: Tensor) -> None:
        """Make the next forward write its rows to these slots."""
        for layer in self._layers:
            layer.slots_N = slots_N

    def any_size(self, mark: Callable[[Tensor, int], object]) -> None:
        """Call ``mark`` for the dimensions that may change: the number of slots, and the number of rows written."""
        for layer in self._layers:
            mark(layer.keys, 2)
            mark(layer.values, 2)
            mark(layer.slots_N, 0)
