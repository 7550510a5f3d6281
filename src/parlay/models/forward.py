"""What runs a native decoder's rows: the seam between a runner, which knows sequences, and the kernels below it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from parlay.cache import Rows
from parlay.types import Exactness, Segment, Skip


@dataclass(frozen=True, slots=True)
class Kernels:
    """``reason``: which kernels run, and why, in one line."""

    exactness: Exactness
    reason: str
    cache_dtype: torch.dtype


class Work(NamedTuple):
    """The rows of one forward: ``ids`` of all segments, where each segment's keys lie, and who wants logits."""

    ids: list[int]
    segments: Sequence[Segment]
    places: Sequence[Rows]
    wanted: list[int]
    taps: Sequence[int] = ()
    skip: Skip = frozenset()


class Result(NamedTuple):
    """``logits`` ``[wanted, V]`` float32, and the hidden states ``[N, H]`` that enter the tapped layers."""

    logits: Tensor
    taps: dict[int, Tensor]


class Forward(Protocol):
    """A decoder's weights and kernels."""

    @property
    def kernels(self) -> Kernels: ...

    def run(self, work: Work) -> Result:
        """Run the rows; keys and values go to their places."""
        ...
