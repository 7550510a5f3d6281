"""A small model that answers for a large one where it is sure enough: the threshold, its certificate, its audits."""

from __future__ import annotations

import dataclasses
import logging
import math
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parlay.options import Options, option
from parlay.quality.allowed import Floor
from parlay.quality.bounds import contradicts
from parlay.quality.certificate import Binding, Claim, Sampling, read_part, read_parts, write_parts
from parlay.types import ParlayError, SamplingParams

logger = logging.getLogger(__name__)

PROBE = 16
"""Tokens of the small model's answer by which it is judged."""
THRESHOLDS = tuple(place / 40 for place in range(40, -1, -1))
"""What may become the threshold, in the order of tests: from the safest, which lets nearly nothing by."""


def sureness(logprobs: Sequence[float]) -> float:
    """How sure a model is of an answer: the mean probability of its first `PROBE` tokens, given their logarithms."""
    first = logprobs[:PROBE]
    return sum(map(math.exp, first)) / len(first) if first else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold(Options):
    """The small model answers where its `sureness` is at least ``least``.

    ``good`` and ``by_small`` count the calibration's answers: those that were good, whichever model gave them, and
    those that the small model would have given.
    """

    least: float = option(low=0, high=1)
    good: int = option(low=0)
    by_small: int = option(low=1)
    audited: int = option(0, low=0)
    bad: int = option(0, low=0)
    revoked: bool = option(False)


@dataclass(frozen=True, slots=True)
class Cascade:
    """Among requests to ``large`` like the calibration's, a share of at least ``claim.floor`` gets a good answer.

    It is good if it agrees with the large model's. With a chance of at most 1 - ``claim.confidence``, over the draw of
    the calibration's prompts, that is wrong.
    """

    small: Binding
    large: Binding
    sampling: Sampling
    claim: Claim
    threshold: Threshold

    def audited(self, good: bool) -> Cascade:
        """After one more audit of a request, whichever model answered it."""
        one = self.threshold
        audited, bad = one.audited + 1, one.bad + (not good)
        revoked = one.revoked or contradicts(bad, audited, self.claim.floor, self.claim.confidence)
        return dataclasses.replace(self, threshold=dataclasses.replace(one, audited=audited, bad=bad, revoked=revoked))


def write(cascade: Cascade, path: Path) -> None:
    """Raises ParlayError where it can't be written."""
    write_parts(dataclasses.asdict(cascade), path)


def read(path: Path) -> Cascade:
    """Raises ParlayError for a file that is no certificate of a cascade, in one line."""
    data = read_parts(path, ("small", "large", "sampling", "claim", "threshold"))
    claim, threshold = read_part(Claim, data["claim"], path), read_part(Threshold, data["threshold"], path)
    if threshold.bad > threshold.audited or not claim.shown_by(threshold.good):
        raise ParlayError(f"{path} is damaged: its counts do not show its floor; calibrate again")
    small, large = read_part(Binding, data["small"], path), read_part(Binding, data["large"], path)
    return Cascade(small, large, read_part(Sampling, data["sampling"], path), claim, threshold)


class HeldCascade:
    """A cascade's certificate in its file. Audits change both; any thread may call."""

    def __init__(self, path: Path, *, share: float) -> None:
        self.path = path
        self.cascade = read(path)
        self._share = share
        self._draws = random.Random()
        self._lock = threading.Lock()

    def due(self) -> bool:
        """Whether the request that has come is one of those to audit: a draw, whatever it is."""
        return self._draws.random() < self._share

    def opens(self, floor: Floor | None, params: SamplingParams) -> bool:
        """Whether a request that allows this may be answered by the small model."""
        if floor is None or self.cascade.threshold.revoked:
            return False
        claim = self.cascade.claim
        return claim.implies(floor) and claim.covers(self.cascade.sampling, params)

    def audit(self, score: float) -> None:
        """Count a request whose answer agrees so far with the large model's. What contradicts the floor revokes it."""
        with self._lock:
            self.cascade = self.cascade.audited(score >= self.cascade.claim.agreement)
            try:
                write(self.cascade, self.path)
            except ParlayError as error:
                logger.warning("an audit is counted, but not kept: %s", error)
        found = self.cascade.threshold
        if found.revoked:
            logger.warning("%d of %d audits contradict %s: it is revoked", found.bad, found.audited, self.path)
