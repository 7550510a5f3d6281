"""Builds the drafter and the accept rule of a strategy."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from parlay.drafters.heads.proving import ProvedHeads
from parlay.drafters.resources import NestedStrategy, Resources
from parlay.options import Options, options_of
from parlay.strategies import accept_rules
from parlay.strategies.catalogue import find
from parlay.strategies.entry import K
from parlay.strategies.spelling import StrategySpec
from parlay.types import AcceptRule, Drafter, Escape


def build(spec: StrategySpec, resources: Resources) -> Drafter | None:
    """A new drafter as the spec asks for it, or None for plain decoding. Raises UsageError where it can't be had."""
    entry = find(spec.name)
    if not entry.factory:
        return None
    nested = tuple(_nested(member, resources) for member in spec.members)
    heads = ProvedHeads(resources.find_head) if resources.find_head else None
    own = replace(resources, rule=accept_rules.name_in(spec.settings), nested=nested, find_head=heads)
    factory = resolve(entry.factory)
    drafter = factory(own) if entry.options is Options else factory(own, options(spec))
    if heads is not None:
        heads.prove(str(spec), drafter)
    return drafter


def options(spec: StrategySpec) -> Options:
    """The drafter's own options as the spec sets them."""
    entry, settings = find(spec.name), spec.settings
    return entry.options(**{key: settings[key] for key in options_of(entry.options)})


def build_rule(spec: StrategySpec) -> AcceptRule:
    """The accept rule that the spec names."""
    return accept_rules.build(spec.settings)


def build_escape(spec: StrategySpec) -> Escape | None:
    """When the strategy's texts go on under plain decoding's own rule, if they ever do."""
    floor = accept_rules.escape_floor(spec.settings)
    return Escape(floor, accept_rules.build({})) if floor > 0 else None


def resolve(factory: str) -> Callable[..., Drafter]:
    """The class that ``module:Class`` names."""
    module, _, attribute = factory.partition(":")
    return cast(Callable[..., Drafter], importlib.import_module(module).__dict__[attribute])


def _nested(spec: StrategySpec, resources: Resources) -> NestedStrategy:
    k = spec.settings.get(K, 0)
    assert isinstance(k, int)
    return NestedStrategy(spec.name, spec.nested, k, options(spec), lambda: build(spec, resources))
