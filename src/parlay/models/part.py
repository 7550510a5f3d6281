"""The part of a model that one of several processes runs, and the groups in which processes exchange numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from parlay.cache import Spread
from parlay.cache.pages import ALONE
from parlay.compiled import structs
from parlay.models.lora import LowRankAdapter
from parlay.types import RunnerLost

_MOST = 64
"""Most processes of a model."""


class Loss(NamedTuple):
    """A lost process: its rank if known, and the reason in one line."""

    rank: int | None
    reason: str


class Group(Protocol):
    """Processes, this one included, that run the same layers together."""

    @property
    def device(self) -> torch.device:
        """The device of the numbers that they exchange."""
        ...

    def add(self, numbers_N: Tensor) -> None:
        """Replace numbers (float32 on the device) by their sums over all processes."""
        ...

    @property
    def loss(self) -> Loss | None:
        """A lost process of the group, if there is one; numbers exchanged since then are invalid."""
        ...


@runtime_checkable
class HostGroup(Group, Protocol):
    """A group that exchanges numbers in host memory."""

    @property
    def struct(self) -> structs.RanksStruct:
        """The group as the library's struct."""
        ...

    def gather(self, numbers_RN: Tensor) -> None:
        """Fill in the other processes' rows of float32 numbers; this process's row is set already."""
        ...


def _whole(adapter: LowRankAdapter) -> LowRankAdapter:
    """Keep the whole adapter."""
    return adapter


class Part(NamedTuple):
    """The part of a model that a process runs. ``group`` are the processes that run the other heads and units of the
    same layers.

    ``context`` are the processes with the other keys and values of each text, which ``spread`` describes. ``cut`` takes
    this process's part of an adapter. Without ``logits`` this process computes no logits. With ``states`` taps are
    inputs of the next layer, even after the last one, as other processes have the final norm.
    """

    group: Group | None = None
    logits: bool = True
    states: bool = False
    context: HostGroup | None = None
    spread: Spread = ALONE
    cut: Callable[[LowRankAdapter], LowRankAdapter] = _whole

    def check(self) -> None:
        """Raises RunnerLost if a process was lost during the last forward, whose numbers are then invalid.

        A process in two groups continues when one of them loses a member, so its other group must learn of it before
        using its numbers: all processes report all losses.
        """
        losses = [group.loss for group in (self.group, self.context) if group is not None]
        found = next((loss for loss in losses if loss is not None), None)
        if self.group is not None and self.context is not None:
            lost_R = torch.zeros(_MOST)
            for loss in losses:
                if loss is not None and loss.rank is not None:
                    lost_R[loss.rank] = 1
            self.context.add(lost_R)
            self.group.add(lost_R)
            ranks = lost_R.nonzero().flatten().tolist()
            found = found or next(
                (Loss(rank, f"rank {rank} has not done its part of a forward") for rank in ranks), None
            )
        if found is not None:
            raise RunnerLost(found.reason)


WHOLE = Part()
