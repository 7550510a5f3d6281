"""The accept rules by name: the values of a strategy's ``rule``, and their own options, written ``RULE.OPTION``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from parlay.options import Option, Options, UsageError, Value, of_kinds, option, options_of
from parlay.strategies import imported
from parlay.types import AcceptRule, DraftKind, Exactness

RULE = "rule"
ESCAPE = "escape"
BY_KIND = "by_kind"


@dataclass(frozen=True, slots=True)
class RuleEntry:
    """One accept rule. ``factory``: ``module:Class``, imported on first use and called with the rule's own options."""

    name: str
    kind: DraftKind
    exactness: Exactness
    summary: str
    reference: str
    factory: str
    options: type[Options] = Options


@dataclass(frozen=True, slots=True, kw_only=True)
class LossyOptions(Options):
    """Options of all lossy rules. The engine reads them, not the rule; see `Escape`."""

    escape: float = option(0.0, "mean of p / max p below which the rest is decoded exactly; 0: never", low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TypicalOptions(LossyOptions):
    """Options of typical acceptance: when a token is likely enough."""

    eps: float = option(0.09, "a token of at least this probability is accepted", low=0, high=1)
    delta: float = option(0.3, "so is one of at least this share of exp(-entropy)", low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdOptions(LossyOptions):
    """Options of threshold rules: when a token is near enough to the best one."""

    beta: int = option(5, "a token must be among so many of the likeliest", low=1)
    tau: float = option(3.0, "a token's logit may be so far below the highest", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions(LossyOptions):
    """Options of rules for reasoning steps: when a step is good enough."""

    nats: float = option(0.4, "highest mean of -log p over the step's tokens; 0: exact match", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackOptions(LossyOptions):
    """Options of rollback rules: when the target takes a token back."""

    nats: float = option(2.0, "highest -log p of an accepted token; the likeliest token always passes", low=0)
    by_kind: tuple[str, ...] = option(
        (),
        "`nats` by kind of request, as in maths/3+code/1; `parlay calibrate --fit` finds them",
        kinds=True,
    )


_RULES = (
    RuleEntry(
        name="shared-noise",
        kind="point",
        exactness=Exactness.BITS,
        summary="Samples each token as plain decoding would, and accepts drafted tokens as long as they are the same.",
        reference="",
        factory="shared_noise:SharedNoise",
    ),
    RuleEntry(
        name="rejection",
        kind="iid",
        exactness=Exactness.DISTRIBUTION,
        summary="Accepts a drawn token x with probability min(1, p(x) / q(x)).",
        reference="Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318",
        factory="rejection:Rejection",
    ),
    RuleEntry(
        name="multi-candidate",
        kind="iid",
        exactness=Exactness.DISTRIBUTION,
        summary="Applies rejection to several independent draws in turn, each against the rest of the distribution.",
        reference="Miao et al. 2024 (SpecInfer), arXiv:2305.09781",
        factory="rejection:Rejection",
    ),
    RuleEntry(
        name="without-replacement",
        kind="without_replacement",
        exactness=Exactness.DISTRIBUTION,
        summary="Works as multi-candidate, for draws without replacement, in the order in which they were drawn.",
        reference="Jeon et al. 2024 (RSD), arXiv:2402.14160; Chen et al. 2024 (Sequoia), arXiv:2402.12374",
        factory="rejection:WithoutReplacement",
    ),
    RuleEntry(
        name="k-seq",
        kind="iid",
        exactness=Exactness.DISTRIBUTION,
        summary="Accepts one of k independent draws, and judges each more strictly than rejection.",
        reference="Sun et al. 2023 (SpecTr), arXiv:2310.15141",
        factory="k_seq:KSeq",
    ),
    RuleEntry(
        name="block",
        kind="iid",
        exactness=Exactness.DISTRIBUTION,
        summary="Judges a drawn chain as a whole, and on average accepts at least as many tokens as rejection.",
        reference="Sun et al. 2024, arXiv:2403.10444",
        factory="block:BlockVerification",
    ),
    RuleEntry(
        name="typical",
        kind="point",
        exactness=Exactness.LOSSY,
        summary="Accepts tokens above a probability that is lower where the target is unsure; greedy: exact match.",
        reference="Cai et al. 2024 (Medusa), arXiv:2401.10774",
        factory="lossy:Typical",
        options=TypicalOptions,
    ),
    RuleEntry(
        name="threshold",
        kind="point",
        exactness=Exactness.LOSSY,
        summary="Accepts tokens close to the best one in rank and logit, greedy or sampled.",
        reference="Xia et al. 2022 (GAD++), arXiv:2203.16487; Stern et al. 2018, arXiv:1811.03115",
        factory="lossy:Threshold",
        options=ThresholdOptions,
    ),
    RuleEntry(
        name="rollback",
        kind="point",
        exactness=Exactness.LOSSY,
        summary="Accepts tokens whose -log p is at most `nats`, and the target's likeliest token.",
        reference="Kim et al. 2023 (BiLD), arXiv:2302.07863",
        factory="lossy:Rollback",
        options=RollbackOptions,
    ),
)
UNVERIFIED = RuleEntry(
    name="unverified",
    kind="point",
    exactness=Exactness.LOSSY,
    summary="Accepts drafted tokens without a check, up to one that a mask, a schema or truncation rules out.",
    reference="Tuli et al. 2024 (DynaMo), arXiv:2405.00888",
    factory="lossy:Unverified",
    options=LossyOptions,
)
"""A rule only for drafters whose catalogue entries name it."""
STEP = RuleEntry(
    name="step",
    kind="point",
    exactness=Exactness.LOSSY,
    summary="Accepts a chain as a whole if its tokens' mean log-probability is high enough; else exact match.",
    reference="Pan et al. 2025 (SpecReason), arXiv:2504.07891",
    factory="lossy:Step",
    options=StepOptions,
)
"""For drafts that are whole steps of reasoning."""
RULES: Mapping[str, RuleEntry] = MappingProxyType({entry.name: entry for entry in (*_RULES, UNVERIFIED, STEP)})

GUESSED = tuple(entry.name for entry in _RULES if entry.kind == "point")
"""The rules that judge fixed guesses, and so work with every drafter. Plain decoding's own rule comes first."""
DRAWN = tuple(entry.name for entry in _RULES if entry.kind != "point")
"""The rules that need drafts drawn from a distribution, with the drafter's probabilities."""


_DRAFTED_FOR: Mapping[DraftKind, str] = MappingProxyType(
    {"point": GUESSED[0], "iid": "multi-candidate", "without_replacement": "without-replacement"}
)
"""For each kind of drafts, the built-in rule that the drafts are meant for."""


def find(name: str) -> RuleEntry:
    """Return the rule of this name, or the rule that ``package.module:NAME`` names. Raises UsageError if there is
    none."""
    if ":" not in name:
        return RULES[name]
    made = imported.rule(name)
    summary = (inspect.getdoc(type(made)) or "").partition("\n")[0]
    return RuleEntry(name, next(iter(made.kinds)), made.exactness, summary, "see its documentation", name)


def drafted_for(settings: Mapping[str, Value]) -> str:
    """Return the rule that a strategy's drafter makes drafts for: the strategy's rule or, if that is imported, the
    built-in rule for the same kind of drafts."""
    name = name_in(settings)
    return _DRAFTED_FOR[find(name).kind] if ":" in name else name


def parameters(names: Sequence[str]) -> dict[str, Option]:
    """Return the parameters of a strategy with these rules: ``rule``, by default the first, and the rules' own
    options."""
    rule = Option(RULE, str, names[0], f"accept rule: {', '.join(names)}", choices=tuple(names), imports=True)
    own = {f"{name}.{key}": option for name in names for key, option in options_of(RULES[name].options).items()}
    return {RULE: rule, **own}


def check(strategy: str, given: Mapping[str, str], known: Mapping[str, Option]) -> None:
    """Raise UsageError for a rule that can't judge the strategy's drafts, and for options of another rule.

    No rule is imported where the parameter `RULE` does not allow it.
    """
    rule = given.get(RULE, "")
    known_or_class = RULE in known and (rule in RULES or (known[RULE].imports and ":" in rule))
    if known_or_class and not _judges(rule, known[RULE].choices):
        kind = find(rule).kind.replace("_", " ")
        raise UsageError(
            f"strategy {strategy}: rule={rule} judges drafts of kind {kind!r}, which {strategy} does not draw; "
            f"choose one of {', '.join(known[RULE].choices)}"
        )
    for key in given:
        owner, dot, _ = key.partition(".")
        if dot and key in known and owner != (rule or known[RULE].default):
            raise UsageError(f"strategy {strategy}: {key} is a parameter of rule={owner}, which is not asked for")


def _judges(rule: str, choices: Sequence[str]) -> bool:
    """Whether the rule is one of the choices. An imported rule counts if it judges the same kind of drafts as one of
    them."""
    return rule in choices or (":" in rule and find(rule).kind in {RULES[each].kind for each in choices})


def name_in(settings: Mapping[str, Value]) -> str:
    """Return the name of the rule in a strategy's settings; plain decoding's own rule if none is set."""
    name = settings.get(RULE, GUESSED[0])
    assert isinstance(name, str)
    return name


def build(settings: Mapping[str, Value]) -> AcceptRule:
    """Make the rule in a strategy's settings. Raises UsageError for unknown kinds of requests."""
    name = name_in(settings)
    if ":" in name:
        return imported.rule(name)
    module, _, attribute = RULES[name].factory.partition(":")
    factory = importlib.import_module(f"parlay.sampling.rules.{module}").__dict__[attribute]
    given: dict[str, object] = {**_own(settings)}
    given.pop(ESCAPE, None)
    if isinstance(words := given.get(BY_KIND), tuple):
        given[BY_KIND] = of_kinds(f"{name}.{BY_KIND}", words)
    return cast(AcceptRule, factory(**given))


def escape_floor(settings: Mapping[str, Value]) -> float:
    """Return the running score below which the strategy's texts continue with exact decoding; 0: never."""
    floor = _own(settings).get(ESCAPE, 0.0)
    assert isinstance(floor, int | float)
    return floor


def _own(settings: Mapping[str, Value]) -> dict[str, Value]:
    """Return the settings of the rule's own options."""
    name = name_in(settings)
    return {key: settings.get(f"{name}.{key}", each.default) for key, each in options_of(find(name).options).items()}
