"""Certificates: what a calibration has shown about lossy strategies, for which model and which requests.

A certificate is a JSON file. Audits add their counts to it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from parlay.certificates.bounds import SCORE, at_least, contradicts
from parlay.certificates.requirement import DOUBT, Floor
from parlay.options import Options, UsageError, option, options_of
from parlay.system.user_cache import one_writer, saved_whole
from parlay.types import ParlayError, SamplingParams

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


VERSION = 2
_KIND = "parlay_certificate"
_MAX_BYTES = 1 << 20

T = TypeVar("T", bound=Options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(Options):
    """The sampling parameters of the calibration's answers. The certificate covers requests with the same ones."""

    temperature: float = option(low=0)
    top_k: int = option(low=0)
    top_p: float = option(low=0, high=1)
    min_p: float = option(low=0, high=1)
    typical_p: float = option(low=0, high=1)
    repetition_penalty: float = option(low=0)
    presence_penalty: float = option(low=-2, high=2)
    frequency_penalty: float = option(low=-2, high=2)
    min_tokens: int = option(low=0)
    ignore_eos: bool = option()

    @classmethod
    def of(cls, params: SamplingParams) -> Self:
        """Return the sampling of a request. In a greedy one, parameters that only sampling uses get their defaults."""
        usual = SamplingParams() if params.greedy else params
        return cls(
            temperature=params.temperature,
            top_k=usual.top_k,
            top_p=usual.top_p,
            min_p=usual.min_p,
            typical_p=usual.typical_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            min_tokens=params.min_tokens,
            ignore_eos=params.ignore_eos,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding(Options):
    """The model that a certificate is for. Other weights, data types or draft models may give other answers."""

    model: str = option()
    weights: str = option()
    """SHA-256 of the weights."""
    settings: str = option()
    """SHA-256 of what converts texts to tokens and back: config.json, tokenizer, chat template, end tokens."""
    dtype: str = option()
    draft_model: str = option()
    """The draft model of strategies that name none; empty if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim(Options):
    """The certified claim: at least a share ``floor`` of answers agree with the exact ones by ``agreement`` or more.

    ``answers`` counts the calibration's answers. ``max_tokens`` limited their length.
    """

    answers: int = option(low=1)
    prompts: str = option()
    """SHA-256 of the prompts."""
    max_tokens: int = option(low=1)
    floor: float = option(low=0, high=1)
    score: str = option(choices=(SCORE,))
    agreement: float = option(low=0, high=1)
    confidence: float = option(low=0.5, high=1 - DOUBT)

    def covers(self, sampling: Sampling, params: SamplingParams) -> bool:
        """Whether the claim covers a request with these parameters.

        The request must sample as the calibration did, allow no longer answers, and change no logits by a bias, a
        processor or a format.
        """
        short = params.max_tokens is not None and params.max_tokens <= self.max_tokens
        return short and not params.edits_logits and params.form is None and Sampling.of(params) == sampling

    def implies(self, floor: Floor) -> bool:
        """Whether the claim is at least as strong as the floor that a request states."""
        sure = floor.agreement <= self.agreement and floor.confidence <= self.confidence
        return sure and floor.floor <= self.floor

    def shown_by(self, good: int) -> bool:
        """Whether Clopper and Pearson's bound proves the claim if ``good`` of the calibration's answers were good."""
        return good <= self.answers and at_least(good, self.answers, self.floor) <= 1 - self.confidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(Options):
    """Counts: ``good`` answers of the calibration, answers ``audited`` since, and how many of these were ``bad``."""

    good: int = option(low=0)
    audited: int = option(0, low=0)
    bad: int = option(0, low=0)
    revoked: bool = option(False)

    def after(self, claim: Claim, *, good: bool) -> Self:
        """Return the counts after one more audit. They become revoked if all audits together contradict the claim."""
        audited, bad = self.audited + 1, self.bad + (not good)
        revoked = self.revoked or contradicts(bad, audited, claim.floor, claim.confidence)
        return dataclasses.replace(self, audited=audited, bad=bad, revoked=revoked)

    @property
    def uncounted(self) -> Self:
        """The counts as they were before any audit."""
        return dataclasses.replace(self, audited=0, bad=0, revoked=False)

    def joined(self, other: Self) -> Self:
        """Return the one of the two counts that has more audits. It is revoked if either of them is."""
        latest = other if other.audited > self.audited else self
        return dataclasses.replace(latest, revoked=self.revoked or other.revoked)

    def shows(self, claim: Claim) -> bool:
        """Whether these counts are consistent and prove the claim."""
        return self.bad <= self.audited and claim.shown_by(self.good)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified(Evidence):
    """A certified strategy. ``speed`` is the ratio of its tokens per second to exact decoding's."""

    strategy: str = option()
    speed: float = option(low=0)


@dataclass(frozen=True, slots=True)
class Certificate:
    """Certifies that each strategy gives at least a share ``claim.floor`` of good answers.

    This holds for requests like the calibration's. The chance that it is wrong for any of the strategies is at most
    1 - ``claim.confidence``, over the random choice of the calibration's prompts.
    """

    binding: Binding
    sampling: Sampling
    claim: Claim
    strategies: tuple[Certified, ...]

    def covers(self, params: SamplingParams) -> bool:
        """Whether the certificate covers a request with these parameters; see `Claim.covers`."""
        return self.claim.covers(self.sampling, params)

    def implies(self, certified: Certified, floor: Floor) -> bool:
        """Whether the strategy is certified for the floor that a request states, or a higher one, and not revoked."""
        return not certified.revoked and self.claim.implies(floor)

    @property
    def uncounted(self) -> Certificate:
        """The certificate as it was before any audit."""
        return dataclasses.replace(self, strategies=tuple(one.uncounted for one in self.strategies))

    def audited(self, strategy: str, good: bool) -> Certificate:
        """Return the certificate after one more audit of the strategy."""
        after = [one.after(self.claim, good=good) if one.strategy == strategy else one for one in self.strategies]
        return dataclasses.replace(self, strategies=tuple(after))


def write(certificate: DataclassInstance, path: Path) -> None:
    """Write a certificate to a file in the format of `VERSION`. Raises ParlayError if it can't be written."""
    with saved_whole(path) as part:
        fields = {_KIND: VERSION, **dataclasses.asdict(certificate)}
        part.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def read(path: Path) -> Certificate:
    """Read a certificate in the format of `VERSION`. Raises ParlayError, in one line, for any other file."""
    data = read_parts(path, ("binding", "sampling", "claim", "strategies"))
    if not isinstance(data["strategies"], list):
        raise ParlayError(f"{path} is damaged: its strategies are not a list; calibrate again")
    strategies = tuple(read_part(Certified, one, path) for one in data["strategies"])
    binding, sampling = read_part(Binding, data["binding"], path), read_part(Sampling, data["sampling"], path)
    claim = read_part(Claim, data["claim"], path)
    check_counts(strategies, claim, path)
    return Certificate(binding, sampling, claim, strategies)


def check_counts(shown: Sequence[Evidence], claim: Claim, path: Path) -> None:
    """Raise ParlayError unless each of the counts proves the claim."""
    if not all(one.shows(claim) for one in shown):
        raise ParlayError(f"{path} is damaged: its counts do not prove its claim; calibrate again")


def read_parts(path: Path, names: Sequence[str]) -> Mapping[str, Any]:
    """Read a certificate file whose parts must have exactly these names. Raises ParlayError for any other file."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ParlayError(f"{path} is not a certificate: it is larger than {_MAX_BYTES:,} bytes")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ParlayError(f"can't read the certificate {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ParlayError(f"{path} is not a certificate: it is not JSON; parlay calibrate writes one") from None
    if not isinstance(data, dict) or _KIND not in data:
        raise ParlayError(f"{path} is not a certificate; parlay calibrate writes one")
    if data[_KIND] != VERSION:
        raise ParlayError(f"{path} is a certificate of version {data[_KIND]!r}, not {VERSION}: calibrate again")
    if sorted(data) != sorted((_KIND, *names)):
        raise ParlayError(f"{path} is damaged or of another kind: it must have exactly the parts {', '.join(names)}")
    return data


def read_part(declared: type[T], given: object, path: Path) -> T:
    """Return one part of a file, with its fields checked. Raises ParlayError for wrong fields or values."""
    if not isinstance(given, dict) or given.keys() != options_of(declared).keys():
        names = ", ".join(options_of(declared))
        raise ParlayError(f"{path} is damaged: its {declared.__name__.lower()} must have {names}; calibrate again")
    try:
        return declared(**given)
    except UsageError as error:
        raise ParlayError(f"{path} is damaged: {error}; calibrate again") from None


logger = logging.getLogger(__name__)

C = TypeVar("C", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class Audited:
    """The facts certified of a strategy or a cascade: the claim, and the counts of calibration and audits."""

    gate: str
    claim: Claim
    evidence: Evidence


class AuditedFile(ABC, Generic[C]):
    """A certificate together with its file. A ``share`` of the answers that it allows are audited. Any thread may call.

    Several processes may hold one file's certificate, as the replicas of a server do. Each process adds its audits to
    the other processes' audits in the file. A certificate that one process revokes is revoked for all.
    """

    def __init__(self, path: Path, read: Callable[[Path], C], *, share: float) -> None:
        """Read the certificate with ``read``, whose errors are raised."""
        self.path, self._read, self._share = path, read, share
        self._stamp = _stamp(path)
        self._certificate = read(path)
        self._draws = random.Random()
        self._lock = threading.Lock()
        self._is_replaced = False

    @abstractmethod
    def _joined(self, kept: C) -> C | None:
        """Return the certificate with the audits of ``kept``, the certificate in the file.

        Returns None if ``kept`` certifies something else.
        """

    @property
    def certificate(self) -> C:
        """The certificate, with the audits that all processes have written to the file."""
        if _stamp(self.path) != self._stamp:
            with self._lock:
                self._catch_up()
        return self._certificate

    def due(self) -> bool:
        """Decide at random whether to audit the present request."""
        return self._draws.random() < self._share

    def count(self, audited: Callable[[C], C], about: str, evidence: Callable[[C], Evidence]) -> None:
        """Count one more audit, here and in the file.

        ``audited`` returns the certificate after the audit. If its ``evidence`` is then revoked, the log names the
        strategy ``about``. The file stays as it is if a later calibration has replaced the certificate in it.
        """
        with self._lock, one_writer(self.path.parent):
            self._catch_up()
            self._certificate = audited(self._certificate)
            found = evidence(self._certificate)
            if not self._is_replaced:
                try:
                    write(self._certificate, self.path)
                except ParlayError as error:
                    logger.warning("an audit counts until this process ends, but can't be saved: %s", error)
                self._stamp = _stamp(self.path)
        if found.revoked:
            told = f"{found.bad} of {found.audited} audits"
            logger.warning("%s contradict the certificate of %s: it is revoked in %s", told, about, self.path)

    def _catch_up(self) -> None:
        """Join the audits in the file to the certificate, if the file can be read."""
        self._stamp = _stamp(self.path)
        try:
            joined = self._joined(self._read(self.path))
        except ParlayError:
            return
        if joined is None and not self._is_replaced:
            logger.warning("%s now holds another certificate: load the model again to use it", self.path)
        self._is_replaced = joined is None
        self._certificate = joined or self._certificate


def _stamp(path: Path) -> tuple[int, int]:
    """Return the file's modification time in nanoseconds and its size in bytes; zeros if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
