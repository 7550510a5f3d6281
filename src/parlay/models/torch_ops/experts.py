"""Experts that don't fit on a device: the host's memory has all of them, and those are copied that rows have chosen.

A layer's router runs first, so that only its rows' experts are needed. They are copied into slots and stay there until
others of their layer need the room: the one used longest ago goes first (Eliseev and Mazur 2023, "Fast Inference of
Mixture-of-Experts Language Models with Offloading"). Each layer has its share of the slots, because with one order for
all of them a layer's experts would be gone whenever its turn comes. While one is computed, the next ones are copied.
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
"""A layer, and an expert's number in it."""


class _Coming(NamedTuple, Generic[Mark]):
    expert: Expert
    slot: int
    copied: Mark


class ExpertShelf(Shelf, Generic[Mark]):
    """``slots`` on the device, of which each holds one of the ``experts``, or none yet."""

    def __init__(
        self, experts: Mapping[Expert, HostLayer[GatedMlp]], slots: Sequence[Tensor], lane: Lane[Mark]
    ) -> None:
        assert len(slots) >= BUFFERS, "one is computed while another one is copied"
        self._experts, self._slots, self._lane = experts, slots, lane
        self._held: OrderedDict[Expert, tuple[int, Mark]] = OrderedDict()
        """Experts by last use, with their slots and the ends of their copies."""
        self._unused = list(range(len(slots)))
        self._share = len(slots) / len({layer for layer, _ in experts})
        self._computed: dict[int, Mark] = {}
        """By slot, what the computing stream must have done before it is overwritten."""

    def in_order(self, layer: int, chosen: Sequence[int]) -> Iterator[GatedMlp]:
        """Yield the chosen experts of a layer; each is there until the next one is asked for."""
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
        """Begin to copy the experts that are left, as long as there are slots that none waits in."""
        while left:
            expert = left[0]
            if expert not in self._held:
                slot = self._free_slot(left, {each.expert for each in coming})
                if slot is None:
                    return
                image_B = self._experts[expert].memory_B
                after = self._computed[slot] if slot in self._computed else self._lane.computed()
                self._held[expert] = slot, self._lane.copy(self._slots[slot][: len(image_B)], image_B, after)
            self._held.move_to_end(expert)
            coming.append(_Coming(expert, *self._held[expert]))
            left.popleft()

    def _free_slot(self, left: deque[Expert], waiting: set[Expert]) -> int | None:
        """An unused slot, else that of the expert used longest ago of layers with more than their share.

        One that is needed later goes only where none waits that will be done with before.
        """
        if self._unused:
            return self._unused.pop(0)
        counts = Counter(layer for layer, _ in self._held)
        counts[left[0][0]] += 1  # the one that will come
        done = [expert for expert in self._held if expert not in waiting and expert not in left]
        rich = [expert for expert in done if counts[expert[0]] > self._share] or done
        if not rich and waiting:
            return None
        gone = rich[0] if rich else max(expert for expert in self._held if expert in left)
        return self._held.pop(gone)[0]


def place_experts(
    layers: Iterable[DecoderLayer], room: WeightRoom, resident: int, lane: Lane[Mark], device: torch.device
) -> PlacedLayers[DecoderLayer]:
    """Keep all but the experts of a mixture on the device, and as many of these as the room holds beside that.

    Layers are asked for one by one. Raises ParlayError where the room does not hold the least that works, or the
    host's memory not the experts.
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
