"""A small model that answers for a large one where it is sure enough: the threshold, its certificate, its audits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parlay.certificates.certificate import (
    Binding,
    Claim,
    Evidence,
    Held,
    Sampling,
    check_counts,
    read_part,
    read_parts,
)
from parlay.certificates.requirement import Floor
from parlay.options import option
from parlay.types import SamplingParams

PROBE = 16
"""Tokens of the small model's answer by which it is judged."""
THRESHOLDS = tuple(place / 40 for place in range(40, -1, -1))
"""What may become the threshold, in the order of tests: from the safest, which lets nearly nothing by."""


def sureness(logprobs: Sequence[float]) -> float:
    """How sure a model is of an answer: the mean probability of its first `PROBE` tokens, given their logarithms."""
    first = logprobs[:PROBE]
    return sum(map(math.exp, first)) / len(first) if first else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeThreshold(Evidence):
    """The small model answers where its `sureness` is at least ``least``.

    Good are answers whichever model gave them; ``by_small`` counts those of the calibration that the small model would
    have given.
    """

    least: float = option(low=0, high=1)
    by_small: int = option(low=1)


@dataclass(frozen=True, slots=True)
class RequestCascade:
    """Among requests to ``large`` like the calibration's, a share of at least ``claim.floor`` gets a good answer.

    It is good if it agrees with the large model's. With a chance of at most 1 - ``claim.confidence``, over the draw of
    the calibration's prompts, that is wrong.
    """

    small: Binding
    large: Binding
    sampling: Sampling
    claim: Claim
    threshold: CascadeThreshold

    @property
    def uncounted(self) -> RequestCascade:
        """The same before any audit."""
        return dataclasses.replace(self, threshold=self.threshold.uncounted)

    def audited(self, good: bool) -> RequestCascade:
        """After one more audit of a request, whichever model answered it."""
        return dataclasses.replace(self, threshold=self.threshold.after(self.claim, good=good))


def read(path: Path) -> RequestCascade:
    """Raises ParlayError for a file that is no certificate of a cascade, in one line."""
    data = read_parts(path, ("small", "large", "sampling", "claim", "threshold"))
    claim, threshold = read_part(Claim, data["claim"], path), read_part(CascadeThreshold, data["threshold"], path)
    check_counts([threshold], claim, path)
    small, large = read_part(Binding, data["small"], path), read_part(Binding, data["large"], path)
    return RequestCascade(small, large, read_part(Sampling, data["sampling"], path), claim, threshold)


class HeldCascade(Held[RequestCascade]):
    """A cascade's certificate in its file."""

    def __init__(self, path: Path, *, share: float) -> None:
        super().__init__(path, read, share=share)

    def _joined(self, kept: RequestCascade) -> RequestCascade | None:
        mine = self._certificate
        if kept.uncounted != mine.uncounted:
            return None
        return dataclasses.replace(mine, threshold=mine.threshold.joined(kept.threshold))

    def opens(self, floor: Floor | None, params: SamplingParams) -> bool:
        """Whether a request that allows this may be answered by the small model."""
        cascade = self.certificate
        if floor is None or cascade.threshold.revoked:
            return False
        return cascade.claim.implies(floor) and cascade.claim.covers(cascade.sampling, params)

    def audit(self, score: float) -> None:
        """Count a request whose answer agrees so far with the large model's. What contradicts the floor revokes it."""
        good = score >= self.certificate.claim.agreement
        self.count(lambda cascade: cascade.audited(good), "a cascade", lambda cascade: cascade.threshold)
