"""The interface between a native runner, which knows sequences, and the decoders that run its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from parlay.cache import Rows
from parlay.types import NO_SKIP, Exactness, Features, Skip


@dataclass(frozen=True, slots=True)
class Kernels:
    """``reason``: which kernels run, and why, in one line."""

    exactness: Exactness
    reason: str
    cache_dtype: torch.dtype


class Work(NamedTuple):
    """The rows that one forward runs: the ``ids`` of all sequences' rows in order. ``wanted`` are those with logits.

    ``places`` say where each sequence's rows lie, ``features`` what some of them read besides or instead of their ids:
    each the number of its first row, and its inputs.
    """

    ids: list[int]
    places: Sequence[Rows]
    wanted: list[int]
    taps: Sequence[int] = ()
    skip: Skip = NO_SKIP
    features: Sequence[tuple[int, Features]] = ()


class Result(NamedTuple):
    """``logits`` ``[wanted, V]`` float32, and the hidden states ``[N, H]`` that enter the tapped layers."""

    logits: Tensor
    taps: dict[int, Tensor]


def with_features(embedded_NH: Tensor, features: Sequence[tuple[int, Features]]) -> Tensor:
    """The rows' embeddings, with `Features` in the place of some or added to them, in place."""
    for first, inputs in features:
        rows_KH = embedded_NH[first : first + len(inputs.rows_KH)]
        given_KH = inputs.rows_KH.to(device=rows_KH.device, dtype=rows_KH.dtype)
        rows_KH.copy_(rows_KH + given_KH if inputs.added else given_KH)
    return embedded_NH


class Forward(Protocol):
    """A decoder's weights and kernels."""

    @property
    def kernels(self) -> Kernels: ...

    def run(self, work: Work) -> Result:
        """Run the rows; keys and values go to their places."""
        ...
