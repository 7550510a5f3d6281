"""A certificate in its file, which audits change."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from parlay.certificates.certificate import Claim, Evidence, write
from parlay.types import ParlayError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

C = TypeVar("C", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class Audited:
    """Certified facts of one gate, a strategy or a cascade, and the counts of calibration and audits."""

    gate: str
    claim: Claim
    evidence: Evidence


class Held(Generic[C]):
    """A certificate and where it is kept. A share of the requests that it opens are audited. Any thread may call."""

    def __init__(self, path: Path, certificate: C, *, share: float) -> None:
        self.path, self.certificate = path, certificate
        self._share = share
        self._draws = random.Random()
        self._lock = threading.Lock()

    def due(self) -> bool:
        """Whether the request that has come is one of those to audit: a draw, whatever it is."""
        return self._draws.random() < self._share

    def count(self, audited: Callable[[C], C], about: str, evidence: Callable[[C], Evidence]) -> None:
        """Replace the certificate by what ``audited`` makes of it after one more audit, here and in the file.

        Where the ``evidence`` in it is revoked, the log names what it is ``about``.
        """
        with self._lock:
            self.certificate = audited(self.certificate)
            found = evidence(self.certificate)
            try:
                write(self.certificate, self.path)
            except ParlayError as error:
                logger.warning("an audit is counted, but not kept: %s", error)
        if found.revoked:
            told = f"{found.bad} of {found.audited} audits"
            logger.warning("%s contradict the certificate of %s: it is revoked in %s", told, about, self.path)
