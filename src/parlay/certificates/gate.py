"""Chooses a request's strategy by the exactness that it requires, the strategy that it names, and the certificates."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from parlay.certificates.bounds import agreement
from parlay.certificates.certificate import Audited, AuditedFile, Binding, Certificate, Certified, Sampling, read
from parlay.certificates.requirement import Allowed, Floor
from parlay.certificates.ways import Loaded, Way, Ways
from parlay.drafters.resources import Resources
from parlay.drafters.stores.datastore_file import fingerprint
from parlay.models.fetch.origin import weights_fingerprint
from parlay.models.fetch.resolving import resolve
from parlay.models.lora import digest_of
from parlay.options import Ensemble, LoadOptions, Nest, user_path
from parlay.strategies import accept_rules
from parlay.strategies.catalogue import find
from parlay.strategies.entries.canvases import DENOISE
from parlay.strategies.spelling import StrategySpec, parse
from parlay.types import Exactness, FieldError, ParlayError, RunnerSpec, SamplingParams, Tokenizer

PLAIN = "none"
ONE_BY_ONE = f"{DENOISE}:selector=confidence"
"""The reference of models that have no exact decoding. It fills one position per forward, so filling positions in
parallel costs it no quality."""


class CertificateFile(AuditedFile[Certificate]):
    """A certificate of strategies together with its file."""

    def __init__(self, path: Path, *, share: float) -> None:
        super().__init__(path, read, share=share)
        self.specs = {parse(one.strategy): one.strategy for one in self.certificate.strategies}

    def _joined(self, kept: Certificate) -> Certificate | None:
        mine = self._certificate
        if kept.uncounted != mine.uncounted:
            return None
        pairs = zip(mine.strategies, kept.strategies, strict=True)
        return dataclasses.replace(mine, strategies=tuple(one.joined(other) for one, other in pairs))

    def find(self, spec: StrategySpec) -> Certified | None:
        """Return what is certified of a strategy; None if the certificate does not name it."""
        return _named(self.certificate, self.specs[spec]) if spec in self.specs else None

    def audit(self, spec: StrategySpec, answer: Sequence[int], exact: Sequence[int]) -> None:
        """Count an answer that was also decoded exactly. Audits that contradict the claim revoke the strategy."""
        name = self.specs[spec]
        good = agreement(answer, exact) >= self.certificate.claim.agreement
        self.count(lambda each: each.audited(name, good), name, lambda each: _named(each, name))


def _named(certificate: Certificate, strategy: str) -> Certified:
    return next(one for one in certificate.strategies if one.strategy == strategy)


@dataclass(frozen=True, slots=True)
class ExactnessChoice:
    """The strategy that a request is decoded with, and the certificate that allows it if it is lossy."""

    strategy: str | StrategySpec
    certificate: CertificateFile | None = None


class CertificateGate:
    """Chooses strategies for the requests of one model.

    ``level`` is the exactness that the model's plain decoding reaches. A ``share`` of certified lossy answers are
    audited: compared with exact decoding or, if the model has none, with the strategy ``reference``. Raises ParlayError
    for a certificate with another ``binding`` or an unknown strategy, and for two certificates that cover the same
    requests.
    """

    def __init__(
        self,
        level: Exactness,
        binding: Callable[[], Binding],
        paths: Sequence[Path] = (),
        *,
        ways: Ways,
        share: float = 0.0,
        reference: StrategySpec | None = None,
    ) -> None:
        self._level = level
        self.ways = ways
        """The present cost of each way to decode. The caller must pass finished answers to `Ways.learn`."""
        self.reference = reference
        """The strategy that answers are compared with; None means the exact form of the default strategy."""
        self.binding = binding
        """Return what certificates of this model are bound to. The first call reads all weights."""
        self._files = [CertificateFile(path, share=share) for path in paths]
        seen: list[Certificate] = []
        for file in self._files:
            _check_binding(file, binding())
            if any(file.certificate.sampling == other.sampling for other in seen):
                raise ParlayError(f"{file.path} covers the same sampling as another certificate: remove one of them")
            seen.append(file.certificate)

    @property
    def certifies(self) -> bool:
        """Whether there are certificates."""
        return bool(self._files)

    def audited(self) -> list[Audited]:
        """Return the claims about each strategy, and their counts. Several certificates may name a strategy.

        Any thread may call.
        """
        certificates = [file.certificate for file in self._files]
        return [Audited(one.strategy, each.claim, one) for each in certificates for one in each.strategies]

    def choose(
        self,
        allowed: Allowed | None,
        named: str | StrategySpec | None,
        usual: str | StrategySpec,
        params: SamplingParams,
        kind: Callable[[], str] = str,
    ) -> ExactnessChoice:
        """Choose the strategy of a request.

        The request ``named`` a strategy or gets the ``usual`` one. If it does not say which exactness is ``allowed``,
        or allows lossy decoding without a floor, that strategy is used as it is. Otherwise ValueError is raised if
        ``named`` is not allowed. A request that names no strategy and requires an exact level gets the exact form of
        ``usual``. If it states a floor, it gets the way that is cheapest now for requests of this ``kind``: exact
        decoding, or a strategy that is certified for the floor.
        """
        if allowed is None or (allowed.level is Exactness.LOSSY and allowed.floor is None):
            return ExactnessChoice(named or usual)
        strategy = named or usual
        spec = strategy if isinstance(strategy, StrategySpec) else parse(strategy)
        if allowed.floor is not None:
            return self._with_floor(allowed.floor, named, spec, params, kind)
        if Exactness.weakest(self._level, allowed.level) is not allowed.level:
            raise FieldError(
                "exactness", f"{allowed.level} is stricter than this model guarantees: ask for {self._level}"
            )
        if Exactness.weakest(rule_level(spec), allowed.level) is allowed.level:
            return ExactnessChoice(named or usual)
        if named is not None:
            raise FieldError(
                "exactness",
                f"{allowed.level} forbids strategy {spec}, which is {rule_level(spec)}: change one of them",
                "strategy",
            )
        return ExactnessChoice(exact_form(spec))

    def _with_floor(
        self,
        floor: Floor,
        named: str | StrategySpec | None,
        spec: StrategySpec,
        params: SamplingParams,
        kind: Callable[[], str],
    ) -> ExactnessChoice:
        """Choose for a request that states a floor.

        A lossy strategy that the request names is used, or ValueError is raised. Otherwise certified strategies compete
        with exact decoding, except for a request that names an exact strategy, unless that strategy is a router.
        """
        lossy = rule_level(spec) is Exactness.LOSSY
        if named is not None and lossy and spec != self.reference:
            return ExactnessChoice(spec, self._certificate(spec, floor, params))
        competing = self._certified(floor, params) if named is None or find(spec.name).routes else []
        exact = (self.reference or exact_form(spec)) if lossy else named or spec
        if not competing:
            return ExactnessChoice(exact)
        ways = [Way(str(exact)), *(Way(one.strategy, one.speed) for one, _ in competing)]
        chosen = self.ways.cheapest(ways, kind())
        return (
            ExactnessChoice(parse(ways[chosen].strategy), competing[chosen - 1][1])
            if chosen
            else ExactnessChoice(exact)
        )

    def _certified(self, floor: Floor, params: SamplingParams) -> list[tuple[Certified, CertificateFile]]:
        """Return the strategies certified for such a request that were faster than exact decoding in calibration."""
        return [
            (one, file)
            for file in self._files
            if file.certificate.covers(params)
            for one in file.certificate.strategies
            if one.speed > 1 and file.certificate.implies(one, floor)
        ]

    def _certificate(self, spec: StrategySpec, floor: Floor, params: SamplingParams) -> CertificateFile:
        """Return the certificate that allows a named lossy strategy. If none does, raise ValueError with the reason."""
        about = [(file, found) for file in self._files if (found := file.find(spec)) is not None]
        if not about:
            raise FieldError("exactness", f"lossy:{floor} needs a certificate of {spec}: parlay calibrate writes one")
        covering = [(file, found) for file, found in about if file.certificate.covers(params)]
        if not covering:
            raise FieldError(
                "exactness",
                f"lossy:{floor}: the certificate of {spec} covers only requests that do not edit logits and "
                f"have {_conditions(about[0][0].certificate)}: send such a request, or calibrate",
            )
        file, found = covering[0]
        if found.revoked:
            raise FieldError(
                "exactness", f"lossy:{floor}: audits have revoked the certificate of {spec}: calibrate again"
            )
        if not file.certificate.implies(found, floor):
            claim = file.certificate.claim
            shown = Floor(floor=claim.floor, agreement=claim.agreement, confidence=claim.confidence)
            raise FieldError(
                "exactness", f"lossy:{floor} is stricter than the certificate of {spec}: ask for lossy:{shown}"
            )
        return file


def open_gate(
    paths: Sequence[str | Path],
    model: object,
    ensemble: Ensemble | Nest | None,
    resources: Resources,
    file: Loaded,
    *,
    share: float,
    load: LoadOptions,
) -> CertificateGate:
    """Make the gate of a loaded model, or of an ensemble of models.

    ``load`` holds the options that the model was loaded with. Raises ParlayError as `CertificateGate` does, and
    ValueError for a ``share`` that is not between 0 and 1.
    """
    target, draft_model = resources.target, resources.default_draft
    assert target is not None
    if isinstance(share, bool) or not isinstance(share, int | float):
        raise FieldError("audit_share", f"must be a number, got {share!r:.60}")
    if not 0 <= share <= 1:
        raise FieldError("audit_share", f"must be between 0 and 1, got {share:g}")

    @cache
    def binding() -> Binding:
        if not isinstance(model, str):
            raise ParlayError("a certificate needs the hash of the model's files: load the model by name or path")
        others = (*ensemble.models, *ensemble.files) if ensemble is not None else ()
        weights = weights_fingerprint(model, *others)
        if load.lora is not None:
            weights = hashlib.sha256(f"{weights} {digest_of(user_path(load.lora))}".encode()).hexdigest()
        numbers = [target.dtype, load.quantize or "", load.kv_cache_dtype.removeprefix("auto")]
        drafts = [draft_model or "", load.draft_quantize or ""]
        return Binding(
            model=target.name,
            weights=weights,
            settings=_settings(model, target, resources.tokenizer, load.end_tokens),
            dtype=" ".join(filter(None, numbers)),
            draft_model=" ".join(filter(None, drafts)),
        )

    reference = parse(ONE_BY_ONE) if target.fills_only else None
    files = [Path(path) for path in paths]
    return CertificateGate(target.promised, binding, files, ways=Ways(file), share=share, reference=reference)


def _settings(model: str, target: RunnerSpec, tokenizer: Tokenizer | None, ends: str | None) -> str:
    """Return the hash of the settings that `Binding.settings` lists.

    A GGUF file has no config.json; the hash of its weights includes its settings.
    """
    config = resolve(model) / "config.json"
    digest = hashlib.sha256(config.read_bytes() if config.is_file() else b"")
    read = ("", "") if tokenizer is None else (fingerprint(tokenizer), str(tokenizer.chat_template))
    digest.update("\0".join([*read, *map(str, target.eos_ids), ends or ""]).encode())
    return digest.hexdigest()


def rule_level(spec: StrategySpec) -> Exactness:
    """Return the exactness that the strategy's accept rule guarantees, or its selector if it fills canvases."""
    if find(spec.name).selects:
        return find(spec.name).exactness
    return accept_rules.find(accept_rules.name_in(spec.settings)).exactness


@lru_cache(maxsize=256)
def chooses(strategy: str | StrategySpec) -> bool:
    """Tell whether a strategy chooses drafters or thresholds by the kind of request.

    The results are cached. Raises UsageError for an unknown strategy.
    """
    spec = strategy if isinstance(strategy, StrategySpec) else parse(strategy)
    entry = find(spec.name)
    by_kind = any(entry.parameters[key].kinds for key, _ in spec.parameters)
    return entry.routes or by_kind or any(chooses(member) for member in spec.members)


def exact_form(spec: StrategySpec) -> StrategySpec:
    """Return the strategy with plain decoding's accept rule, or plain decoding if that rule can't verify its drafts."""
    own, rules = accept_rules.GUESSED[0], find(spec.name).rules
    if rule_level(spec) is Exactness.BITS:
        return spec
    if own not in rules:
        return parse(PLAIN)
    kept = {key: value for key, value in spec.parameters if key != accept_rules.RULE and "." not in key}
    return StrategySpec(spec.name, tuple(kept.items()), spec.members).changed(**{accept_rules.RULE: own})


def _conditions(certificate: Certificate) -> str:
    """Describe the temperature, the other sampling parameters that are not the defaults, and the longest answer."""
    usual = dataclasses.asdict(Sampling.of(SamplingParams()))
    given = dataclasses.asdict(certificate.sampling)
    own = [f"{name}={value:g}" for name, value in given.items() if name == "temperature" or usual[name] != value]
    return f"{', '.join(own)} and max_tokens of at most {certificate.claim.max_tokens}"


def _check_binding(file: CertificateFile, binding: Binding) -> None:
    given = file.certificate.binding
    for what, theirs, ours in (
        ("weights", given.weights, binding.weights),
        ("config, tokenizer, template and end tokens", given.settings, binding.settings),
        ("data type", given.dtype, binding.dtype),
        ("draft model", given.draft_model, binding.draft_model),
    ):
        if theirs != ours:
            has = f"{what} {_short(theirs)}, and {binding.model} has {_short(ours)}"
            raise ParlayError(f"{file.path} certifies {has}: calibrate for this model")
    for spec in file.specs:
        if rule_level(spec) is not Exactness.LOSSY:
            raise ParlayError(f"{file.path} is damaged: {spec} is not lossy, so it needs no certificate")


def _short(word: str) -> str:
    return (word[:12] or "none").strip()
