"""Finds the drafters of a strategy: none, one, or several to choose from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.router.arms import Arm
from parlay.strategies.building import build, works
from parlay.strategies.catalogue import catalogue, find
from parlay.strategies.entry import K
from parlay.strategies.spelling import StrategySpec, parse
from parlay.types import KINDS, Drafter, Needs

_HEADS, _MODELS = "heads", "model"  # families of the catalogue
HEAD = "head"
"""The option that names a head, or the kind of texts that it was trained on."""


def drafters_of(spec: StrategySpec, resources: Resources) -> tuple[StrategySpec, ...]:
    """Return the strategies whose drafters this strategy uses: the ones that it chooses from, or itself."""
    return candidates(spec, resources) if find(spec.name).routes else (spec,)


def build_all(wanted: Iterable[StrategySpec], resources: Resources) -> tuple[Drafter, ...]:
    """Build the drafters of these strategies. Raises UsageError if one can't be built."""
    built = [build(each, resources) for each in wanted]
    return tuple([drafter for drafter in built if drafter is not None])


def candidates(spec: StrategySpec, resources: Resources) -> tuple[StrategySpec, ...]:
    """Return the strategies to choose from: the ones that the spec names, or else the ones that the target can use.

    In the second case, each family of the catalogue gives its usable strategy with the highest ``arm``. Trained heads
    also give a strategy for each kind of requests that has a head of its own. A strategy that drafts from predictions
    comes first, for requests that have one. A draft model is left out if there is a head, because it costs more and is
    right less often. A strategy that drafts during the target's forwards needs spare threads. Raises UsageError for a
    strategy without a drafter, and for a strategy that is named twice.
    """
    for member in spec.members:
        if not find(member.name).factory:
            raise UsageError(f"strategy {spec.name}: {member.name} has no drafter of its own; remove it")
    if len(set(spec.members)) < len(spec.members):
        raise UsageError(f"strategy {spec.name}: {spec} names a drafter twice; remove one of them")
    if spec.members:
        return spec.members
    best: dict[str, str] = {}
    for entry in sorted(catalogue().values(), key=lambda entry: (entry.family != _HEADS, -entry.arm)):
        left_out = entry.family in best or (entry.family == _MODELS and _HEADS in best)
        left_out |= entry.beside and not resources.spare_threads
        if entry.arm and not left_out and works(entry.name, resources):
            best[entry.family] = entry.name
    predicting = [parse(name) for name, entry in catalogue().items() if entry.predicts and works(name, resources)]
    general = [parse(name) for name in catalogue() if name in best.values()]
    return (*predicting, *general, *(special for each in general for special in _for_kinds(each, resources)))


def _for_kinds(general: StrategySpec, resources: Resources) -> Iterator[StrategySpec]:
    """Yield the same strategy with each head that was trained on texts of one kind."""
    if HEAD in general.settings:
        specials = [general.changed(head=kind) for kind in KINDS if kind in resources.domains()]
        yield from [each for each in specials if works(str(each), resources)]


def as_arms(
    wanted: Sequence[StrategySpec], drafters: Sequence[Drafter], size: float, *, named: bool
) -> tuple[Arm, ...]:
    """Return an arm for each strategy and its drafter; see `as_arm`. Arms that a spec ``named`` serve all requests."""
    each = [as_arm(spec, drafter.needs, size) for spec, drafter in zip(wanted, drafters, strict=True)]
    return tuple([replace(arm, named=named) for arm in each])


def as_arm(spec: StrategySpec, needs: Needs, size: float = 1.0) -> Arm:
    """Describe a strategy, whose drafter has these needs, to a router.

    ``size``: a factor on the largest number of nodes that it drafts, unless the spec sets this number.
    """
    most = spec.settings[K]
    assert isinstance(most, int)
    if K not in dict(spec.parameters):
        most = math.ceil(most * size)
    head = spec.settings.get(HEAD)
    domain = str(head) if head in KINDS else ""
    return Arm(
        *(str(spec), most, find(spec.name).replayable, domain, needs.expected),
        sees_first=bool(needs.taps),
        layers=needs.layers and not needs.taps,
        predicts=find(spec.name).predicts,
    )
