"""The effort of strategies that choose among drafters, where it is said beside their names."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.options import UsageError
from parlay.strategies.catalogue import find
from parlay.strategies.entry import EFFORT
from parlay.strategies.spelling import StrategySpec, parse

_FOR_WHOM = "is for strategies that choose among drafters, as auto does"


def with_effort(spec: StrategySpec, effort: str) -> StrategySpec:
    """The same strategy with this effort. Raises UsageError where it has none, or another one already."""
    if not find(spec.name).routes:
        raise UsageError(f"--effort {effort} {_FOR_WHOM}: strategy {spec} does not")
    given = dict(spec.parameters).get(EFFORT, effort)
    if given != effort:
        raise UsageError(f"--effort {effort}: strategy {spec} says {given} itself; leave out one of the two")
    return spec.changed(effort=effort)


def all_with_effort(strategies: Sequence[str], effort: str) -> tuple[str, ...]:
    """The same strategies, those that choose among drafters with this effort.

    Raises UsageError where there is none, or one has another effort already.
    """
    specs = [parse(each) for each in strategies]
    if not any(find(spec.name).routes for spec in specs):
        raise UsageError(f"--effort {effort} {_FOR_WHOM}: {', '.join(strategies)} do not")
    return tuple([str(with_effort(spec, effort) if find(spec.name).routes else spec) for spec in specs])
