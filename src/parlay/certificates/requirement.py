"""The exactness that a request requires: ``bits``, ``seed``, ``distribution``, ``lossy`` or ``lossy:floor=X[,...]``."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.options import Options, UsageError, nearest, option, options_of, split
from parlay.types import Exactness

AUDIT_SHARE = 0.02
"""Default share of certified lossy answers that are audited: decoded exactly, too, and compared."""
DOUBT = 1e-9
"""The smallest value of 1 - confidence: no sample can prove a claim with certainty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor(Options):
    """A lower bound on quality: at least a share ``floor`` of answers agree with the exact answer by ``agreement``.

    The chance that a calibration proves this wrongly is at most 1 - ``confidence``.
    """

    floor: float = option(help="least share of good answers", low=0, high=1)
    agreement: float = option(1.0, "minimum similarity to the exact answer at which an answer is good", low=0, high=1)
    confidence: float = option(0.95, "how sure the calibration must be", low=0.5, high=1 - DOUBT)

    def __str__(self) -> str:
        return f"floor={self.floor:g},agreement={self.agreement:g},confidence={self.confidence:g}"


@dataclass(frozen=True, slots=True)
class Allowed:
    """The weakest level of exactness that a request accepts, and the floor that it states for lossy answers, if any."""

    level: Exactness
    floor: Floor | None = None


def parse(text: str) -> Allowed:
    """Parse ``LEVEL[:key=value,...]``. Raises UsageError with the correct form for any other text."""
    name, colon, rest = text.strip().partition(":")
    if name not in list(Exactness):
        raise UsageError(f"exactness {name!r} is unknown: {nearest(name, list(Exactness))}")
    level = Exactness(name)
    if colon and level is not Exactness.LOSSY:
        raise UsageError(f"exactness {name} has no settings: remove {colon}{rest}")
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
