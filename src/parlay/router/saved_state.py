"""The router's knowledge of a model on a machine, as numbers that outlive the process: the cost of steps, and for each
drafter what was accepted, and what it cost.

No text and no token is among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from parlay.types import NO_COST, KeptCost


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptArm:
    """Kept state of one drafter: the numbers of each part of an `ArmState`. ``kinds``: its gain and record by kind.

    ``row``: the seconds of a forward of one row when it was asked last: other seconds here count beside these.
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
    """The kept state of one model on one machine, of each owner of requests apart from all others."""

    @property
    def apart(self) -> bool:
        """Whether each owner of requests has routers of its own, so that none learns what another's are like."""
        ...

    def recall(self, owner: str) -> Mapping[str, KeptArm]:
        """By drafter; nothing where nothing can be read."""
        ...

    def keep(self, owner: str, arms: Mapping[str, KeptArm]) -> None:
        """In place of what was kept of these drafters before. Never raises, and waits for no disk."""
        ...

    def cost(self) -> KeptCost:
        """The cost of steps, as an earlier process learned; nothing where nothing can be read."""
        ...

    def keep_cost(self, learned: Callable[[], KeptCost]) -> None:
        """Ask for what was learned of the cost whenever something is written, and at the end."""
        ...

    def write(self) -> None:
        """Make sure now that it outlives the process. Never raises."""
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
        """Nobody asks."""

    def write(self) -> None:
        """There is nothing to write."""
