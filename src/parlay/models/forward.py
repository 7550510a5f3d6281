"""The interface between a native runner, which knows sequences, and the decoders that run its rows."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from parlay.cache import Rows
from parlay.compiled.structs import Linear
from parlay.types import NO_SKIP, Exactness, Features, Skip


@dataclass(frozen=True, slots=True)
class Kernels:
    """``reason``: which kernels run, and why, in one line."""

    exactness: Exactness
    reason: str
    cache_dtype: torch.dtype


class SegmentFeatures(NamedTuple):
    """The features of one segment, ``place`` among those of a forward; ``first`` is the flat number of their first row.

    ``anchors`` are the flat numbers of their rows' anchors where they join; see `Join`.
    """

    place: int
    first: int
    features: Features
    anchors: Sequence[int] = ()


class ForwardBatch(NamedTuple):
    """The rows that one forward runs: the ``ids`` of all sequences' rows in order. ``wanted`` are those with logits.

    ``places`` say where each sequence's rows lie, ``features`` what some of them read besides or instead of their ids.
    """

    ids: list[int]
    places: Sequence[Rows]
    wanted: list[int]
    taps: Sequence[int] = ()
    skip: Skip = NO_SKIP
    features: Sequence[SegmentFeatures] = ()


@dataclass(slots=True)
class Taps:
    """The hidden states ``[N, H]`` that enter some layers, as one forward collects them, and the seconds it takes."""

    layers: Collection[int]
    states: dict[int, Tensor] = field(default_factory=dict)
    seconds: float = 0.0

    def take(self, layer: int, hidden_NH: Tensor) -> None:
        """Copy what enters this layer, if it is tapped."""
        if layer in self.layers:
            with self.timed():
                self.states[layer] = hidden_NH.clone()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """The seconds inside the block are counted as the taps'."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


class GrownTree(NamedTuple):
    """A draft as a head has grown it: of each node its token, its parent, and the head's probability of it there."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    chances: tuple[float, ...]


class TreeRequest(NamedTuple):
    """The draft of one text: its ``nodes``, at most. Where the request samples, the ``temperature`` by which its own
    noise is multiplied, and the noise's stream at the place of each level's tokens.
    """

    nodes: int
    temperature: float = 0.0
    streams: Sequence[int] = ()


class Growth(NamedTuple):
    """How a draft head's trees grow (Li et al. 2024, EAGLE-2).

    Each of at most ``levels`` runs the ``width`` likeliest candidates of the level before, which offer as many children
    each. None whose path is less likely than ``least`` is offered, and none runs below which nothing could join the
    draft. ``tokens_D`` int64 are the target's tokens of the outputs. The rows of the texts read what ``first`` makes of
    ``features_NF``, float32.
    """

    levels: int
    width: int
    least: float
    tokens_D: Tensor
    first: Linear
    features_NF: Tensor


class ForwardOutput(NamedTuple):
    """``logits`` ``[wanted, V]`` float32, and the tapped hidden states."""

    logits: Tensor
    taps: Taps


def with_features(embedded_NH: Tensor, features: Sequence[SegmentFeatures]) -> Tensor:
    """The rows' embeddings, with `Features` in the place of some or added to them, in place."""
    for _, first, inputs, _ in features:
        rows_KH = embedded_NH[first : first + len(inputs)]
        given_KH = inputs.rows_KH.to(device=rows_KH.device, dtype=rows_KH.dtype)
        rows_KH.copy_(rows_KH + given_KH if inputs.added else given_KH)
    return embedded_NH


class Forward(Protocol):
    """A decoder's weights and kernels."""

    @property
    def kernels(self) -> Kernels: ...

    def run(self, work: ForwardBatch) -> ForwardOutput:
        """Run the rows; keys and values go to their places."""
        ...
