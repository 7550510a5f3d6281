"""The power that a machine draws while it decodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PowerModel:
    """``watts`` while anything decodes or drafts, and ``row_joules`` for each row of a forward beyond that.

    ``source`` says in one line how these are known: it begins with "measured" or "modelled".
    """

    watts: float
    row_joules: float
    source: str

    def mean(self, rows: int, seconds: float) -> float:
        """Watts in the mean over a forward of so many rows and seconds."""
        return self.watts + self.row_joules * rows / seconds

    def __str__(self) -> str:
        return f"{self.watts:.3g} W and {1000 * self.row_joules:.3g} mJ a row, {self.source}"
