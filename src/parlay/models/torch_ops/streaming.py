"""Runs layers that don't fit on a device: the host's memory keeps them, and every forward copies them ahead of time.

A layer is copied on a second stream into one of two buffers, while another layer computes from the other buffer. A copy
waits until the buffer's previous layer has been computed, and a layer waits for its copy. The copies continue from one
forward to the next: at the end of a forward, those for the next one have been started.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from parlay.cache.budget import format_bytes
from parlay.models.compiled.streaming import WeightRoom
from parlay.types import ParlayError
from parlay.types.layer_split import BUFFERS, LayerSplit

_log = logging.getLogger(__name__)

_ALIGNED = 256
"""Matrices begin at multiples of this many bytes."""

Mark = TypeVar("Mark")
"""A point in a stream's work for which another stream can wait."""


class Lane(Protocol[Mark]):
    """A stream for copies next to the computing stream."""

    def host_memory(self, size: int) -> Tensor:
        """Allocate pinned host memory, uint8 ``[size]``, from which the device can copy."""
        ...

    def copy(self, to_B: Tensor, from_B: Tensor, after: Mark) -> Mark:
        """Start a copy when the computing stream has passed ``after``; the returned mark is after the copy."""
        ...

    def wait(self, copied: Mark) -> None:
        """Make the computing stream wait for a copy before its further work."""
        ...

    def computed(self) -> Mark:
        """Mark the end of the computing stream's work so far."""
        ...


class CudaLane(Lane[torch.cuda.Event]):
    """A stream of a CUDA device. It has never been tested on one."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_memory(self, size: int) -> Tensor:
        """Allocate pinned host memory. Raises ParlayError if the system pins no more memory."""
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise ParlayError(
                f"{size} bytes of the host's memory can't be pinned ({str(error).splitlines()[0]}): free some, or allow"
                " the weights more of the device's memory"
            ) from None

    def copy(self, to_B: Tensor, from_B: Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            to_B.copy_(from_B, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(self._stream)
        return copied

    def wait(self, copied: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(copied)

    def computed(self) -> torch.cuda.Event:
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self._device))
        return mark


class Movable(Protocol):
    """A layer whose matrices can be moved."""

    def with_weights(self, move: Callable[[Tensor], Tensor]) -> Self:
        """Return the layer with ``move`` applied to each matrix, always in the same order."""
        ...


_Layer = TypeVar("_Layer", bound=Movable)


@dataclass(slots=True)
class Region:
    """Hands out consecutive parts of some memory; without memory it only counts."""

    memory_B: Tensor | None = None
    taken: int = 0

    def place(self, like_OI: Tensor) -> Tensor:
        """Return the next part, with the shape and type of a matrix."""
        size = like_OI.nbytes
        begin, self.taken = self.taken, self.taken + size + -size % _ALIGNED
        if self.memory_B is None:
            return like_OI
        return self.memory_B[begin : begin + size].view(like_OI.dtype).view(like_OI.shape)

    def filled(self, like_OI: Tensor) -> Tensor:
        """Return the next part, filled with a copy of a matrix."""
        return self.place(like_OI).copy_(like_OI)


class HostLayer(NamedTuple, Generic[_Layer]):
    """A layer whose matrices are consecutive in host memory."""

    layer: _Layer
    memory_B: Tensor

    @staticmethod
    def of(layer: _Layer, lane: Lane[Mark]) -> HostLayer[_Layer]:
        size = Region()
        layer.with_weights(size.place)
        memory_B = lane.host_memory(size.taken)
        return HostLayer(layer.with_weights(Region(memory_B).filled), memory_B)


class LayerCopies(Generic[Mark]):
    """Copies the streamed layers of a model, ``images`` by number, into ``buffers``, in order, again and again."""

    def __init__(
        self, split: LayerSplit, images: Mapping[int, Tensor], buffers: Sequence[Tensor], lane: Lane[Mark]
    ) -> None:
        self.split, self._images, self._buffers, self._lane = split, images, buffers, lane
        self._numbers = {layer: number for number, layer in enumerate(split.streamed)}
        self._free, self._next = set(range(BUFFERS)), 0
        self._coming: deque[tuple[int, Mark]] = deque()
        """Layers whose copies have been started, in order, with their marks."""

    def in_order(self, layers: Sequence[_Layer]) -> Iterator[tuple[int, _Layer]]:
        """Yield a forward's layers with their numbers; each is valid until the next one is requested."""
        if [layer for layer, _ in self._coming] != list(self.split.streamed[:BUFFERS]):
            self._begin_anew()
        for index, layer in enumerate(layers):
            if index not in self._numbers:
                yield index, layer
                continue
            coming, copied = self._coming.popleft()
            assert coming == index, "layers are computed in their order"
            self._lane.wait(copied)
            yield index, layer
            self._free.add(self._numbers[index] % BUFFERS)
            self._copy_ahead()

    def _begin_anew(self) -> None:
        """Restart with the first layer after a forward that failed."""
        self._coming.clear()
        self._free, self._next = set(range(BUFFERS)), 0
        self._copy_ahead()

    def _copy_ahead(self) -> None:
        """Start copying the next layers into buffers that will be free after the computing stream's work so far.

        With an odd number of layers the last and the first share a buffer, and the first waits for the last.
        """
        while (place := self._next % BUFFERS) in self._free:
            self._free.remove(place)
            layer = self.split.streamed[self._next]
            image_B = self._images[layer]
            copied = self._lane.copy(self._buffers[place][: len(image_B)], image_B, self._lane.computed())
            self._coming.append((layer, copied))
            self._next = (self._next + 1) % len(self.split.streamed)


class PlacedLayers(NamedTuple, Generic[_Layer]):
    """A model's layers, some of which read their matrices from buffers, and the iterator over them."""

    layers: tuple[_Layer, ...]
    in_order: Callable[[Sequence[_Layer]], Iterator[tuple[int, _Layer]]]
    streamed_bytes: int


def place_layers(
    layers: Iterable[_Layer], room: WeightRoom, resident: int, lane: Lane[Mark], device: torch.device
) -> PlacedLayers[_Layer]:
    """Keep as many layers on the device as fit beside ``resident`` bytes, and the others in host memory.

    ``layers`` is consumed one by one; each may be on the device until the next one is requested. Raises ParlayError if
    the room is below the least that works, or if the host's memory can't hold the layers.
    """
    hosts = [HostLayer.of(layer, lane) for layer in layers]
    split = room.split([len(host.memory_B) for host in hosts], resident)
    buffers = [torch.zeros(split.buffer_bytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
    places = {layer: buffers[number % BUFFERS] for number, layer in enumerate(split.streamed)}
    places |= {layer: hosts[layer].memory_B.to(device, copy=True) for layer in split.pinned}
    placed = tuple(host.layer.with_weights(Region(places[layer]).place) for layer, host in enumerate(hosts))
    if not split.streamed:
        return PlacedLayers(placed, enumerate, 0)
    _log.warning(
        "%s does not fit into %s of the device's memory: every forward copies %s of its layers there, %d of %d",
        room.name,
        format_bytes(room.bytes),
        format_bytes(split.streamed_bytes),
        len(split.streamed),
        len(hosts),
    )
    copies = LayerCopies(split, {layer: hosts[layer].memory_B for layer in split.streamed}, buffers, lane)
    return PlacedLayers(placed, copies.in_order, split.streamed_bytes)
