"""The engine's share of a step's time: all that is no forward."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Seconds that the engine takes in a step besides forwards.

    They are the sum of: ``step`` once, ``sequence`` for each sequence, ``drafted`` for each sequence with a draft,
    ``node`` for each drafted node, ``level`` for each forward of a draft model, and ``level_sequence`` for each
    sequence in such a forward.
    """

    step: float = 0.0
    sequence: float = 0.0
    drafted: float = 0.0
    node: float = 0.0
    level: float = 0.0
    level_sequence: float = 0.0

    def of_step(self, batch: int, nodes: int = 0) -> float:
        """Return the seconds of a step of ``batch`` sequences with ``nodes`` drafted nodes each."""
        return self.step + batch * (self.sequence + (self.drafted + self.node * nodes if nodes else 0.0))

    def of_level(self, batch: int) -> float:
        """Return the seconds for one forward of a draft model with ``batch`` sequences."""
        return self.level + batch * self.level_sequence


NO_OVERHEADS = Overheads()
