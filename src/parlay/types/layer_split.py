"""Which layers of a model stay in memory where they don't all fit, and which are read from disk in every forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BUFFERS = 2
"""One layer is read while another one is computed."""


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """Layers by number: ``streamed`` in order, and those that are ``pinned``. Bytes of both, and of one buffer."""

    streamed: tuple[int, ...]
    pinned: tuple[int, ...]
    streamed_bytes: int
    pinned_bytes: int
    buffer_bytes: int

    @property
    def resident_bytes(self) -> int:
        """Bytes that layers take in memory."""
        return self.pinned_bytes + BUFFERS * self.buffer_bytes


def least_room(sizes: Sequence[int]) -> int:
    """The least room in which layers of these ``sizes`` can be streamed: their buffers, or all of few layers."""
    return min(sum(sizes), BUFFERS * max(sizes, default=0))


def split_layers(sizes: Sequence[int], room: int) -> LayerSplit | None:
    """Pin as many layers as ``room`` bytes hold beside two buffers; None if they don't even hold these.

    Streamed layers lie evenly among the pinned ones, so that the disk is at work while these are computed.
    """
    if sum(sizes) <= room:
        return LayerSplit((), tuple(range(len(sizes))), 0, sum(sizes), 0)
    for count in range(BUFFERS + 1, len(sizes) + 1):
        streamed = tuple((2 * place + 1) * len(sizes) // (2 * count) for place in range(count))
        read = sum(sizes[layer] for layer in streamed)
        pinned = tuple(layer for layer in range(len(sizes)) if layer not in streamed)
        split = LayerSplit(streamed, pinned, read, sum(sizes) - read, max(sizes[layer] for layer in streamed))
        if split.resident_bytes <= room:
            return split
    return None
