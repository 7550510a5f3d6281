"""What a router tries for: its goal, how hard, and below which power."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.router.effort import MEDIUM, Effort
from parlay.router.goals import THROUGHPUT, Goal
from parlay.types import PowerModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """``power`` is what the machine draws; None: neither the goal nor a limit needs it.

    ``most_watts``: no draft is verified in a step that would draw more in the mean; 0: no limit.
    """

    goal: Goal = THROUGHPUT
    effort: Effort = MEDIUM
    power: PowerModel | None = None
    most_watts: float = 0.0

    def __post_init__(self) -> None:
        if self.power is None and (self.goal.in_joules or self.most_watts):
            raise ValueError("what the machine draws must be known")

    @property
    def row_seconds(self) -> float:
        """Seconds that a row counts for beside those that it takes: in them the machine draws what the row uses."""
        return self.power.row_joules / self.power.watts if self.power is not None and self.goal.in_joules else 0.0

    def allows(self, rows: int, seconds: float) -> bool:
        """Whether a forward of so many rows and seconds stays below the limit."""
        return self.power is None or not self.most_watts or self.power.mean(rows, seconds) <= self.most_watts


USUAL = Aim()
