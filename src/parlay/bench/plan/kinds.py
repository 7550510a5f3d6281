"""Measured tokens per step, by kind of work: a plan uses them where nothing else was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("kinds.json")
"""Made from the committed rows of `benchmarks/results` by `python -m benchmarks.plan.kinds`."""


@dataclass(frozen=True, slots=True)
class KindRate:
    """One measurement: ``tokens_per_step`` of a strategy on some ``texts`` of a kind, from the rows of a file.

    ``prompts``: the number of prompts decoded, the first ones of the set.
    """

    kind: str
    strategy: str
    texts: str
    tokens_per_step: float
    prompts: int
    rows: str

    @property
    def same_texts(self) -> str:
        """The key that comparable measurements share: as many prompts of one set, answered by one model."""
        return f"{self.prompts} of {self.texts}"

    @property
    def chance(self) -> float:
        """The probability a that the next drafted token is right, from E = 1 / (1 - a) of a long chain."""
        return 1 - 1 / max(1.0, self.tokens_per_step)


@cache
def kind_rates() -> tuple[KindRate, ...]:
    """All measurements."""
    return tuple(KindRate(**each) for each in json.loads(FILE.read_text(encoding="utf-8")))


def kinds() -> list[str]:
    """The kinds of work, in the order of the table."""
    return list(dict.fromkeys(each.kind for each in kind_rates()))


def rates_of(strategy: str, kind: str) -> Sequence[KindRate]:
    """The measurements of a strategy on texts of a kind."""
    return [each for each in kind_rates() if (each.strategy, each.kind) == (strategy, kind)]
