"""How hard a router looks for drafts that pay: one dial, from which its other numbers follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from parlay.router.ledger import GROWTH, TRIALS


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """``trials``: the share of the decoding time that trials may lose. ``growth``: by which each that loses multiplies
    the wait for the next.

    ``price``: a factor on what drafts cost. ``size``: a factor on the most nodes that a drafter is asked for, where
    nobody has set them.
    """

    trials: float
    growth: float = GROWTH
    price: float = 1.0
    size: float = 1.0


MEDIUM = Effort(trials=TRIALS)
EFFORTS: Mapping[str, Effort] = MappingProxyType(
    {
        "low": Effort(trials=0.0, price=1.5, size=0.5),
        "medium": MEDIUM,
        "high": Effort(trials=3 * TRIALS, growth=1.25, size=2.0),
    }
)
