"""The drafters of a strategy: none, one, or those that it chooses from."""

from __future__ import annotations

from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.router.arms import Arm
from parlay.strategies.building import build
from parlay.strategies.catalogue import catalogue, find
from parlay.strategies.entry import K
from parlay.strategies.offering import works
from parlay.strategies.spelling import StrategySpec, parse
from parlay.types import Drafter


def build_all(spec: StrategySpec, resources: Resources) -> tuple[Drafter, ...]:
    """All drafters of the strategy. Raises UsageError where one that is named can't be had."""
    wanted = arms(spec, resources) if find(spec.name).routes else (spec,)
    built = [build(each, resources) for each in wanted]
    return tuple([drafter for drafter in built if drafter is not None])


def arms(spec: StrategySpec, resources: Resources) -> tuple[StrategySpec, ...]:
    """What a strategy chooses from: what its option names, or what exists for the target.

    Of each family of the catalogue that is the strategy of the highest ``arm`` that works there. Raises UsageError for
    a strategy that drafts nothing.
    """
    for member in spec.members:
        if not find(member.name).factory:
            raise UsageError(f"strategy {spec.name}: {member.name} has no drafter of its own; leave it out")
    if spec.members:
        return spec.members
    best = {
        entry.family: entry.name
        for entry in sorted(catalogue().values(), key=lambda entry: entry.arm)
        if entry.arm and works(entry.name, resources)
    }
    return tuple([parse(name) for name in catalogue() if name in best.values()])


def as_arm(spec: StrategySpec) -> Arm:
    """The drafter as a router is told of it."""
    most = spec.settings[K]
    assert isinstance(most, int)
    return Arm(str(spec), most, find(spec.name).replayable)
