"""A router that hands on what it has learned."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.router.aim import USUAL, Aim
from parlay.router.arms import Arm
from parlay.router.router import Router
from parlay.router.saved_state import Memory
from parlay.types import Cost


class RememberingRouter(Router):
    """Begins with what the memory holds of the owner of its requests, and tells the memory after each of them.

    That takes some 15 microseconds, so no request waits for it and a process that is killed has lost little.
    """

    def __init__(
        self,
        memory: Memory,
        owner: str,
        cost: Cost,
        arms: Sequence[Arm],
        aim: Aim = USUAL,
    ) -> None:
        super().__init__(cost, arms, memory.recall(owner), aim)
        self._memory, self._owner, self._told = memory, owner, self.kept()

    def release(self, sequence: int) -> None:
        super().release(sequence)
        learned = self.kept()
        if learned != self._told:
            self._memory.keep(self._owner, learned)
            self._told = learned
