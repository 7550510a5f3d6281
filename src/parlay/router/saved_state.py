"""A router's knowledge of a model on a machine, as numbers that outlive the process.

They are the cost of steps and, for each drafter, what was accepted and what it cost. They hold no text and no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from parlay.types import NO_COST, KeptCost


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptArm:
    """The kept state of one drafter: the numbers of each part of an `ArmState`. ``kinds``: gain and record by kind.

    ``row``: seconds of a forward of one row when the drafter was asked last. All other seconds are relative to it.
    """

    calibration: tuple[float, ...]
    record: tuple[float, ...]
    seconds: tuple[float, ...]
    reading: tuple[float, ...] = ()
    gain: float
    depth: float
    row: float
    kinds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


NOTHING_KEPT: Mapping[str, KeptArm] = MappingProxyType({})


class Memory(Protocol):
    """The kept state of one model on one machine, separately for each owner of requests."""

    @property
    def apart(self) -> bool:
        """Whether each owner has routers of its own, so that none learns what another owner's requests are like."""
        ...

    def recall(self, owner: str) -> Mapping[str, KeptArm]:
        """The kept state, by drafter; empty if nothing can be read."""
        ...

    def keep(self, owner: str, arms: Mapping[str, KeptArm]) -> None:
        """Replace the kept state of these drafters. Never raises, and does not wait for the disk."""
        ...

    def cost(self) -> KeptCost:
        """The cost of steps as an earlier process learned it; `NO_COST` if nothing can be read."""
        ...

    def keep_cost(self, learned: Callable[[], KeptCost]) -> None:
        """Register ``learned``, which is called for the cost of steps at each write and at the end."""
        ...

    def write(self) -> None:
        """Write everything to the disk now. Never raises."""
        ...


@dataclass(frozen=True, slots=True)
class NoMemory:
    """Keeps nothing."""

    apart: bool = False

    def recall(self, owner: str) -> Mapping[str, KeptArm]:
        return NOTHING_KEPT

    def keep(self, owner: str, arms: Mapping[str, KeptArm]) -> None:
        """Keep nothing."""

    def cost(self) -> KeptCost:
        return NO_COST

    def keep_cost(self, learned: Callable[[], KeptCost]) -> None:
        """Never call ``learned``."""

    def write(self) -> None:
        """Write nothing."""
