"""Experts that don't fit on a device: they are kept in the host's memory, and those that rows choose are copied.

A layer's router runs first, so only the experts that its rows chose are needed. They are copied into slots and stay
until other experts of their layer need the room; the least recently used is replaced first (Eliseev and Mazur 2023,
"Fast Inference of Mixture-of-Experts Language Models with Offloading"). Each layer has its share of the slots, as with
one common order a layer's experts would always be gone when its turn comes. While one expert is computed, the next ones
are copied.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from parlay.cache.budget import format_bytes
from parlay.models.compiled.streaming import WeightRoom
from parlay.models.torch_ops.decoder import DecoderLayer
from parlay.models.torch_ops.mlp import GatedMlp, Shelf
from parlay.models.torch_ops.streaming import HostLayer, Lane, Mark, PlacedLayers, Region
from parlay.types import ParlayError
from parlay.types.layer_split import BUFFERS

_log = logging.getLogger(__name__)

Expert = tuple[int, int]
"""A layer's number, and an expert's number in it."""


class _Coming(NamedTuple, Generic[Mark]):
    expert: Expert
    slot: int
    copied: Mark


class ExpertShelf(Shelf, Generic[Mark]):
    """``slots`` on the device, each of which is empty or holds one of ``experts``."""

    def __init__(
        self, experts: Mapping[Expert, HostLayer[GatedMlp]], slots: Sequence[Tensor], lane: Lane[Mark]
    ) -> None:
        assert len(slots) >= BUFFERS, "one is computed while another one is copied"
        self._experts, self._slots, self._lane = experts, slots, lane
        self._resident: OrderedDict[Expert, tuple[int, Mark]] = OrderedDict()
        """Experts in the order of last use, with their slots and the marks of their copies."""
        self._unused = list(range(len(slots)))
        self._share = len(slots) / len({layer for layer, _ in experts})
        self._computed: dict[int, Mark] = {}
        """By slot, the mark that the computing stream must pass before the slot is overwritten."""

    def in_order(self, layer: int, chosen: Sequence[int]) -> Iterator[GatedMlp]:
        """Yield the chosen experts of a layer; each is valid until the next one is requested."""
        left = deque((layer, number) for number in chosen)
        coming: deque[_Coming[Mark]] = deque()
        while left or coming:
            self._copy_ahead(left, coming)
            expert, slot, copied = coming.popleft()
            self._lane.wait(copied)
            try:
                yield self._experts[expert].layer.with_weights(Region(self._slots[slot]).place)
            finally:
                self._computed[slot] = self._lane.computed()

    def _copy_ahead(self, left: deque[Expert], coming: deque[_Coming[Mark]]) -> None:
        """Start copying the experts that are left, while there are slots without a waiting expert."""
        while left:
            expert = left[0]
            if expert not in self._resident:
                slot = self._free_slot(left, {each.expert for each in coming})
                if slot is None:
                    return
                image_B = self._experts[expert].memory_B
                after = self._computed[slot] if slot in self._computed else self._lane.computed()
                self._resident[expert] = slot, self._lane.copy(self._slots[slot][: len(image_B)], image_B, after)
            self._resident.move_to_end(expert)
            coming.append(_Coming(expert, *self._resident[expert]))
            left.popleft()

    def _free_slot(self, left: deque[Expert], waiting: set[Expert]) -> int | None:
        """An empty slot, else that of the least recently used expert of a layer above its share; None if there is none
        now.

        An expert that is still needed is replaced only if no other copied expert will be used before it.
        """
        if self._unused:
            return self._unused.pop(0)
        counts = Counter(layer for layer, _ in self._resident)
        counts[left[0][0]] += 1  # the expert to be copied
        done = [expert for expert in self._resident if expert not in waiting and expert not in left]
        rich = [expert for expert in done if counts[expert[0]] > self._share] or done
        if not rich and waiting:
            return None
        gone = rich[0] if rich else max(expert for expert in self._resident if expert in left)
        return self._resident.pop(gone)[0]


def place_experts(
    layers: Iterable[DecoderLayer], room: WeightRoom, resident: int, lane: Lane[Mark], device: torch.device
) -> PlacedLayers[DecoderLayer]:
    """Keep everything but experts on the device, and as many experts as the room allows beside that.

    ``layers`` is consumed one by one. Raises ParlayError if the room is below the least that works, or if the host's
    memory can't hold the experts.
    """
    placed, experts, size = list[DecoderLayer](), dict[Expert, HostLayer[GatedMlp]](), Region(taken=resident)
    for number, layer in enumerate(layers):
        if (mixture := layer.mixture) is None:
            layer.with_weights(size.place)
            placed.append(layer)
            continue
        hosts = [HostLayer.of(expert, lane) for expert in mixture.experts]
        experts |= {(number, place): host for place, host in enumerate(hosts)}
        layer.with_mixture(replace(mixture, experts=())).with_weights(size.place)
        placed.append(layer.with_mixture(replace(mixture, experts=tuple(host.layer for host in hosts))))
    slot_bytes = max(len(host.memory_B) for host in experts.values())
    count = min(len(experts), (room.bytes - size.taken) // slot_bytes)
    if count < BUFFERS:
        least = size.taken + BUFFERS * slot_bytes
        raise ParlayError(
            f"weights of {room.name} in {format_bytes(room.bytes)} of the device's memory: without experts they take "
            f"{format_bytes(size.taken)}, and {BUFFERS} experts must be there; allow {least} bytes or more"
        )
    _log.warning(
        "%s: %d of %d experts are on the device at a time, others are copied there when rows choose them",
        room.name,
        count,
        len(experts),
    )
    slots = [torch.zeros(slot_bytes, dtype=torch.uint8, device=device) for _ in range(count)]
    shelf = ExpertShelf(experts, slots, lane)
    shelved = tuple(
        layer if layer.mixture is None else layer.with_mixture(replace(layer.mixture, shelf=shelf)) for layer in placed
    )
    return PlacedLayers(shelved, enumerate, (len(experts) - count) * slot_bytes)
