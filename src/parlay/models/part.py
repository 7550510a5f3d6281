"""A part of a model, which one of several processes runs, and the groups in which they exchange numbers."""

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
"""Processes of a model."""


class Loss(NamedTuple):
    """A process that takes part no more, by its rank if that is known, and why in one line."""

    rank: int | None
    reason: str


class Group(Protocol):
    """Processes that run the same layers together; this one among them."""

    @property
    def device(self) -> torch.device:
        """Where the numbers lie that they exchange."""
        ...

    def add(self, numbers_N: Tensor) -> None:
        """Put the sums over all processes in the place of this one's, float32 on the device."""
        ...

    @property
    def loss(self) -> Loss | None:
        """A process that is lost, if one is. What was exchanged since means nothing."""
        ...


@runtime_checkable
class HostGroup(Group, Protocol):
    """Processes that exchange numbers in the host's memory."""

    @property
    def struct(self) -> structs.RanksStruct:
        """The group as the library reads it."""
        ...

    def gather(self, numbers_RN: Tensor) -> None:
        """Fill in the other processes' rows of float32 numbers, of which this one has its own."""
        ...


def _whole(adapter: LowRankAdapter) -> LowRankAdapter:
    """All of an adapter."""
    return adapter


class Part(NamedTuple):
    """Which part of a model a process runs. ``group`` are those that run the same layers' other heads and units.

    ``context`` are those that have the other keys and values of each text, which ``spread`` says. ``cut`` makes the
    part of an adapter that belongs here. Without ``logits`` nobody reads logits here. With ``states`` taps are as the
    next layer reads them, that behind the last one too, for which others have the norm.
    """

    group: Group | None = None
    logits: bool = True
    states: bool = False
    context: HostGroup | None = None
    spread: Spread = ALONE
    cut: Callable[[LowRankAdapter], LowRankAdapter] = _whole

    def check(self) -> None:
        """Raises RunnerLost if a process was lost in the forward that has just run: its numbers mean nothing.

        A process in both kinds of groups goes on with what it has when one of them loses somebody, so those of its
        other group must hear of it before they use what it gave them: all tell all whom they have lost.
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
