"""Turns a strategy into the numbers that the cost model needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from parlay.bench.plan.heads import HEADS
from parlay.cost.roofline import ModelShape
from parlay.cost.speed import DraftPlan
from parlay.drafters.options import PARALLEL_DRAFT, SELF_DRAFT
from parlay.strategies.catalogue import catalogue, find
from parlay.strategies.entry import DEFAULT_STRATEGY, StrategyEntry
from parlay.strategies.spelling import StrategySpec, parse

ADAPTS = "adaptive"
"""The policy that drafts the number of tokens that is fastest. Other policies are modelled as if they always drafted k
nodes."""

_COPYING = ("copy", "store", "retrieval")
_DRAFT_MODEL, _SELF, _PLAIN, _HEADS = "model", "self", "plain", "heads"
MODELLED = (_PLAIN, *_COPYING, _DRAFT_MODEL, _SELF)
"""Families of strategies whose costs are modelled. The heads in `HEADS` are modelled, too."""


@dataclass(frozen=True, slots=True)
class Models:
    """The shapes of the target and of its draft model, if it has one.

    ``heads`` are the names of the heads on this machine that were trained for the target, by method.
    """

    target: ModelShape
    draft: ModelShape | None = None
    heads: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Probabilities that drafted tokens are right: for single strategies, by spelling or name, and for all others.

    If there is no ``default``, strategies without probabilities of their own are assumed never to be right.
    """

    default: tuple[float, ...] | None = None
    by_strategy: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def of(self, spec: StrategySpec) -> tuple[float, ...]:
        """Return the probabilities of a strategy."""
        return self.by_strategy.get(str(spec)) or self.by_strategy.get(spec.name) or self.default or (0.0,)


def read_acceptance(texts: Sequence[str]) -> Acceptance:
    """Read probabilities such as ``0.7`` for all strategies or ``NAME=0.7`` for one.

    ``0.6+0.2`` is for trees: the probabilities of the best guess and of the second best. Raises ValueError for any
    other text.
    """
    default: tuple[float, ...] | None = None
    by_strategy: dict[str, tuple[float, ...]] = {}
    for text in texts:
        name, equals, chances = text.rpartition("=")
        if equals:
            by_strategy[find(name.strip()).name] = _ranks(text, chances)
        else:
            default = _ranks(text, chances)
    return Acceptance(default, by_strategy)


def _ranks(text: str, chances: str) -> tuple[float, ...]:
    try:
        ranks = tuple(float(chance) for chance in chances.split("+"))
    except ValueError:
        ranks = (-1.0,)
    if not all(0 <= rank <= 1 for rank in ranks) or sum(ranks) > 1 + 1e-9:
        raise ValueError(
            f"--acceptance {text}: give a chance from 0 to 1, as in 0.7, or NAME=0.7, or 0.6+0.2 for the best guess "
            "and the second best, together at most 1"
        )
    return ranks


def compared(named: Sequence[StrategySpec], models: Models) -> list[StrategySpec]:
    """Return the strategies to compare: plain decoding, then the named ones.

    If none is named, the others are one that copies, the strategies that the default strategy chooses from (with a
    trained head), and the default strategy itself.
    """
    plain, copying = (_first_of(family) for family in (_PLAIN, _COPYING[0]))
    usuals = [copying, *_arms(models, untrained=True), parse(DEFAULT_STRATEGY)]
    return [plain, *(spec for spec in named or usuals if spec != plain)]


def _first_of(family: str) -> StrategySpec:
    return next(StrategySpec(entry.name) for entry in catalogue().values() if entry.family == family)


def _arms(models: Models, *, untrained: bool) -> list[StrategySpec]:
    """Return the strategies that the default strategy chooses from: in each family, the one with the highest ``arm``.

    Heads are those on this machine or, with ``untrained``, all. Strategies that draft during forwards are left out,
    because only a run can tell how much that slows the forwards.
    """
    best: dict[str, StrategyEntry] = {}
    for entry in catalogue().values():
        wanted = entry.arm > best[entry.family].arm if entry.family in best else entry.arm > 0
        needed = {_DRAFT_MODEL: models.draft is not None, _HEADS: untrained or entry.name in models.heads}
        if wanted and needed.get(entry.family, True) and not entry.beside and is_modelled(entry.name):
            best[entry.family] = entry
    return [StrategySpec(entry.name) for entry in best.values()]


def members(spec: StrategySpec, models: Models) -> list[StrategySpec]:
    """Return the strategies that a strategy chooses from, or the strategy itself if it does not choose.

    A trained head is among them if there is one for the target on this machine, or if the strategy's spelling names it.
    """
    if not find(spec.name).routes:
        return [spec]
    return list(spec.members) or _arms(models, untrained=False)


def drafting(strategies: Sequence[StrategySpec]) -> list[StrategySpec]:
    """Return the strategies with a drafter of their own: neither plain decoding, nor strategies that choose."""
    return [spec for spec in strategies if find(spec.name).factory]


def plan(spec: StrategySpec, models: Models, acceptance: Acceptance) -> DraftPlan:
    """Return the numbers that a strategy's speed depends on.

    Raises ValueError for a strategy whose costs are not modelled, or whose draft model is not known.
    """
    family = find(spec.name).family
    if not is_modelled(spec.name):
        raise ValueError(f"strategy {spec}: no costs are modelled for its family, {family}: {_modelled()}")
    if family == _PLAIN:
        return DraftPlan(name=str(spec))
    settings = spec.settings
    nodes, policy = settings["k"], settings["policy"]
    assert isinstance(nodes, int)
    head = HEADS[spec.name](models.target) if spec.name in HEADS else None
    ranks, beside = acceptance.of(spec), spec.name == PARALLEL_DRAFT
    return DraftPlan(
        name=str(spec),
        nodes=nodes,
        ranks=ranks[:1] if beside else ranks,
        drafter=head.shape if head else _drafter(spec, family, models),
        adapts=policy == ADAPTS,
        at_once=head is not None and head.at_once,
        probes=head.probes if head else 0,
        beside=beside,
    )


def is_modelled(name: str) -> bool:
    """Whether the costs of this strategy, or of the strategies that it chooses from, are modelled."""
    entry = find(name)
    return (entry.family in MODELLED and not entry.fills) or name in HEADS or entry.routes


def _modelled() -> str:
    names = [name for name in catalogue() if is_modelled(name)]
    return f"use one of {', '.join(names)}"


def _drafter(spec: StrategySpec, family: str, models: Models) -> ModelShape | None:
    """Return the shape of the model whose forwards write the drafts; None if drafts are copied from texts.

    Raises ValueError for a strategy that needs a draft model if there is none.
    """
    if family == _DRAFT_MODEL:
        if models.draft is None:
            raise ValueError(f"strategy {spec} drafts with a model: name it with --draft-model")
        return models.draft
    if spec.name == SELF_DRAFT:
        return _in_cheaper_form(spec, models.target)
    if family == _SELF:
        return replace(models.target, num_layers=_layers_that_draft(spec, models.target.num_layers))
    return None


def _in_cheaper_form(spec: StrategySpec, target: ModelShape) -> ModelShape:
    """Return the target in the form in which it drafts: with weights of few bits, and attention to few keys.

    Each block of 32 weights has a scale of 16 bits, half a bit for each weight. Only the newest keys and the first
    ones (``sinks``) are attended to.
    """
    bits, window, sinks = (spec.settings[name] for name in ("bits", "window", "sinks"))
    assert isinstance(bits, int)
    assert isinstance(window, int)
    assert isinstance(sinks, int)
    shape = replace(target, weight_bytes=min(target.weight_bytes, (bits + 0.5) / 8)) if bits else target
    if not window or target.sums is not None:  # in models whose layers differ, all keys are assumed to be attended to
        return shape
    seen = min(window + sinks, target.recent_tokens or window + sinks)
    return replace(shape, recent_layers=target.num_layers, recent_tokens=seen)


def _layers_that_draft(spec: StrategySpec, layers: int) -> int:
    """Return how many of the target's layers write the drafts."""
    leave, ratio = spec.settings.get("exit"), spec.settings.get("ratio")
    if isinstance(leave, int):  # early-exit drafts with the first layers; 0 means a quarter of them
        return min(leave, layers) or max(1, layers // 4)
    assert isinstance(ratio, float)
    # The first and last layer run whole. In the others, the share ``ratio`` of attention and MLP blocks is skipped.
    return max(1, round(layers - ratio * (layers - 2)))
