"""The certificate of a cascade, in which a small model answers for a large one where it is confident enough."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parlay.certificates.certificate import (
    AuditedFile,
    Binding,
    Claim,
    Evidence,
    Sampling,
    check_counts,
    read_part,
    read_parts,
)
from parlay.certificates.requirement import Floor
from parlay.options import option
from parlay.types import SamplingParams

PROBE = 16
"""Tokens of the small model's answer that are judged."""
THRESHOLDS = tuple(place / 40 for place in range(40, -1, -1))
"""Candidate thresholds, in the order of their tests. The first is the safest: there the small model answers almost no
request."""


def sureness(logprobs: Sequence[float]) -> float:
    """Return a model's confidence in its answer: the mean probability of the first `PROBE` tokens, 0 without tokens."""
    first = logprobs[:PROBE]
    return sum(map(math.exp, first)) / len(first) if first else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeThreshold(Evidence):
    """The calibrated threshold: the small model answers where its `sureness` is at least ``least``.

    With this threshold, the small model would have given ``by_small`` of the calibration's answers, and the large one
    the rest. ``good`` counts the good answers among all of them.
    """

    least: float = option(low=0, high=1)
    by_small: int = option(low=1)


@dataclass(frozen=True, slots=True)
class RequestCascade:
    """Certificate that at least a share ``claim.floor`` of requests to ``large`` get a good answer.

    The certificate holds for requests like the calibration's. An answer is good if its agreement with the large model's
    answer is at least ``claim.agreement``. The chance that the certificate is wrong, over the random choice of the
    calibration's prompts, is at most 1 - ``claim.confidence``.
    """

    small: Binding
    large: Binding
    sampling: Sampling
    claim: Claim
    threshold: CascadeThreshold

    @property
    def uncounted(self) -> RequestCascade:
        """The certificate as it was before any audit."""
        return dataclasses.replace(self, threshold=self.threshold.uncounted)

    def audited(self, good: bool) -> RequestCascade:
        """Return the certificate after one more audit. Audits of both models' answers count."""
        return dataclasses.replace(self, threshold=self.threshold.after(self.claim, good=good))


def read(path: Path) -> RequestCascade:
    """Read a cascade's certificate. Raises ParlayError, in one line, for any other file."""
    data = read_parts(path, ("small", "large", "sampling", "claim", "threshold"))
    claim, threshold = read_part(Claim, data["claim"], path), read_part(CascadeThreshold, data["threshold"], path)
    check_counts([threshold], claim, path)
    small, large = read_part(Binding, data["small"], path), read_part(Binding, data["large"], path)
    return RequestCascade(small, large, read_part(Sampling, data["sampling"], path), claim, threshold)


class CascadeFile(AuditedFile[RequestCascade]):
    """A cascade's certificate together with its file."""

    def __init__(self, path: Path, *, share: float) -> None:
        super().__init__(path, read, share=share)

    def _joined(self, kept: RequestCascade) -> RequestCascade | None:
        mine = self._certificate
        if kept.uncounted != mine.uncounted:
            return None
        return dataclasses.replace(mine, threshold=mine.threshold.joined(kept.threshold))

    def opens(self, floor: Floor | None, params: SamplingParams) -> bool:
        """Tell whether the small model may answer a request with this floor and these parameters."""
        cascade = self.certificate
        if floor is None or cascade.threshold.revoked:
            return False
        return cascade.claim.implies(floor) and cascade.claim.covers(cascade.sampling, params)

    def audit(self, score: float) -> None:
        """Count an audit; ``score`` is the agreement of the answer with the large model's.

        Audits that contradict the floor revoke the certificate.
        """
        good = score >= self.certificate.claim.agreement
        self.count(lambda cascade: cascade.audited(good), "a cascade", lambda cascade: cascade.threshold)
