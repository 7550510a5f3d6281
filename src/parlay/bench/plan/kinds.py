"""Measured tokens per step by kind of work, which a plan uses if the user gives and measures no acceptance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("kinds.json")
"""The table of measurements, which `python -m benchmarks.plan.kinds` makes from the rows in `benchmarks/results`."""


@dataclass(frozen=True, slots=True)
class KindRate:
    """One measurement: a strategy's ``tokens_per_step`` on the set ``texts`` of a kind of work.

    The first ``prompts`` prompts of the set were decoded. ``rows`` names the file of results.
    """

    kind: str
    strategy: str
    texts: str
    tokens_per_step: float
    prompts: int
    rows: str

    @property
    def same_texts(self) -> str:
        """A key that is equal for measurements that can be compared: on as many prompts of the same set."""
        return f"{self.prompts} of {self.texts}"

    @property
    def chance(self) -> float:
        """The probability a that the next drafted token is right, from a long chain's tokens per step 1 / (1 - a)."""
        return 1 - 1 / max(1.0, self.tokens_per_step)


@cache
def kind_rates() -> tuple[KindRate, ...]:
    """Return all measurements."""
    return tuple(KindRate(**each) for each in json.loads(FILE.read_text(encoding="utf-8")))


def kinds() -> list[str]:
    """Return the kinds of work, in the order of the table."""
    return list(dict.fromkeys(each.kind for each in kind_rates()))


def rates_of(strategy: str, kind: str) -> Sequence[KindRate]:
    """Return the measurements of a strategy on a kind of work."""
    return [each for each in kind_rates() if (each.strategy, each.kind) == (strategy, kind)]
