"""The exactness that a request requires: ``bits``, ``seed``, ``distribution``, ``lossy`` or ``lossy:floor=X[,...]``."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.options import Options, UsageError, nearest, option, options_of, split
from parlay.types import Exactness

AUDIT_SHARE = 0.02
"""Default share of the lossy answers under a certificate that are audited: decoded exactly, too."""
DOUBT = 1e-9
"""The smallest possible doubt: no claim is ever certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor(Options):
    """How good answers have to be: a share of at least ``floor`` has at least ``agreement`` with the exact answer.

    The calibration that proves this is wrong in at most a share 1 - ``confidence`` of cases.
    """

    floor: float = option(help="least share of good answers", low=0, high=1)
    agreement: float = option(1.0, "minimum similarity to the exact answer at which an answer is good", low=0, high=1)
    confidence: float = option(0.95, "how sure the calibration must be", low=0.5, high=1 - DOUBT)

    def __str__(self) -> str:
        return f"floor={self.floor:g},agreement={self.agreement:g},confidence={self.confidence:g}"


@dataclass(frozen=True, slots=True)
class Allowed:
    """The weakest level that a request accepts, and for lossy ones the floor, if it states one."""

    level: Exactness
    floor: Floor | None = None


def parse(text: str) -> Allowed:
    """Parse ``LEVEL[:key=value,...]``. Raises UsageError, whose message names the correct form."""
    name, colon, rest = text.strip().partition(":")
    if name not in list(Exactness):
        raise UsageError(f"exactness {name!r} is unknown: {nearest(name, list(Exactness))}")
    level = Exactness(name)
    if colon and level is not Exactness.LOSSY:
        raise UsageError(f"exactness {name} has no settings: leave out {colon}{rest}")
    return Allowed(level, _floor(rest) if colon else None)


def _floor(text: str) -> Floor:
    known, given = options_of(Floor), {}
    for part in split(text, ","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise UsageError(f"exactness lossy: expected key=value, got {part!r}")
        if key not in known:
            raise UsageError(f"exactness lossy has no setting {key!r}: {nearest(key, known)}")
        if key in given:
            raise UsageError(f"exactness lossy: {key} is given twice")
        given[key] = known[key].read(f"exactness lossy: {key}", value)
    if "floor" not in given:
        raise UsageError("exactness lossy: no floor is given; write lossy:floor=0.9, or lossy alone for no promise")
    return Floor(**given)  # type: ignore[arg-type]  # the options have read them by their types
