"""Builds a strategy's drafter and accept rule, and tells which strategies a target can use without further files."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import NoReturn, cast

from parlay.drafters.heads.proving import ProvedHeads
from parlay.drafters.resources import NestedStrategy, Resources, at_once
from parlay.options import Options, UsageError, options_of
from parlay.strategies import accept_rules, imported
from parlay.strategies.catalogue import catalogue, find
from parlay.strategies.entries.canvases import OWN, READS, TEMPERATURES, WHOLE, DenoiseOptions
from parlay.strategies.entry import K
from parlay.strategies.spelling import StrategySpec, parse
from parlay.types import ONE_CANVAS, AcceptRule, CanvasLayout, Cooling, Drafter, Escape, Needs, ParlayError, Selector


def build(spec: StrategySpec, resources: Resources) -> Drafter | None:
    """Build a new drafter for the spec; None for plain decoding. Raises UsageError if it can't be built."""
    entry = find(spec.name)
    if not entry.factory:
        return None
    nested = tuple(_nested(member, resources) for member in spec.members)
    heads = ProvedHeads(resources.find_head) if resources.find_head else None
    own = replace(resources, rule=accept_rules.drafted_for(spec.settings), nested=nested, find_head=heads)
    factory = resolve(entry.factory)
    make = partial(factory, own) if entry.options is Options else partial(factory, own, options(spec))
    drafter = make() if spec.name in catalogue() else _made(entry.factory, make)
    if heads is not None:
        resources.prove(partial(heads.prove, str(spec), drafter))
    return drafter


def _made(path: str, make: Callable[[], Drafter]) -> Drafter:
    """Make a drafter that is not Parlay's own. Raises UsageError if that fails, and for wrong ``needs``."""
    drafter = imported.made(path, make)
    if not isinstance(drafter.needs, Needs):
        raise UsageError(f"{path}: its needs must be a parlay.types.Needs, got {drafter.needs!r:.60}")
    return drafter


def options(spec: StrategySpec) -> Options:
    """Return the drafter's own options in the spec."""
    entry, settings = find(spec.name), spec.settings
    return entry.options(**{key: settings[key] for key in options_of(entry.options)})


def build_rule(spec: StrategySpec) -> AcceptRule:
    """Make the accept rule that the spec names."""
    return accept_rules.build(spec.settings)


def build_selector(spec: StrategySpec) -> Selector | None:
    """Make the spec's selector; None if texts are written token by token.

    Raises UsageError for an option of another selector.
    """
    if not find(spec.name).selects:
        return None
    asked = options(spec)
    assert isinstance(asked, DenoiseOptions)
    name, own = asked.selector, OWN[asked.selector]
    for key, _ in spec.parameters:
        if key not in own and any(key in keys for keys in OWN.values()):
            raise UsageError(
                f"strategy {spec}: {key} is not an option of selector={name}, which has {', '.join(own) or 'none'}"
            )
    if name in WHOLE and asked.block:
        raise UsageError(f"strategy {spec}: {name} fills whole canvases; remove block")
    make = importlib.import_module("parlay.sampling.selectors").__dict__["make"]
    return cast(Selector, make(name, {key: spec.settings[key] for key in own if key not in TEMPERATURES}))


def build_layout(spec: StrategySpec) -> CanvasLayout:
    """Return the canvas layout that the spec asks for."""
    asked = options(spec)
    if not isinstance(asked, DenoiseOptions):
        return ONE_CANVAS
    reads, cooling = READS.get(asked.selector, ""), None
    if asked.selector == "renoise":
        cooling = Cooling(asked.t_max, asked.t_min, asked.max_denoising_steps)
    return CanvasLayout(asked.canvas, asked.block, asked.cache == "stale", asked.lengths, reads, cooling)


def build_escape(spec: StrategySpec) -> Escape | None:
    """Return the condition under which the strategy's texts change to plain decoding's own rule; None if they never
    do."""
    floor = accept_rules.escape_floor(spec.settings)
    return Escape(floor, accept_rules.build({})) if floor > 0 else None


def resolve(factory: str) -> Callable[..., Drafter]:
    """Import the class that ``module:Class`` names."""
    module, _, attribute = factory.partition(":")
    return cast(Callable[..., Drafter], importlib.import_module(module).__dict__[attribute])


def _nested(spec: StrategySpec, resources: Resources) -> NestedStrategy:
    k = spec.settings.get(K, 0)
    assert isinstance(k, int)
    return NestedStrategy(spec.name, spec.nested, k, options(spec), lambda: build(spec, resources))


class _Found(Exception):
    """Raised when a drafter would load the target's default draft model or head."""


def offered(resources: Resources, check: Callable[[str, Needs], None]) -> tuple[str, ...]:
    """List the strategies that need no parameter, file or model beyond the target's own, in catalogue order.

    ``check`` raises ValueError for needs that the target can't meet. A draft model with the wrong vocabulary is not
    noticed, because no model is loaded here.
    """
    return tuple(name for name in catalogue() if works(name, resources, check))


def works(name: str, resources: Resources, check: Callable[[str, Needs], None] = lambda name, needs: None) -> bool:
    """Whether `offered` lists the strategy. The test starts to build its drafter, and stops before the first model is
    loaded."""
    target, entry = resources.target, find(parse(name).name)
    if entry.selects or (target is not None and target.fills_only):
        return target is not None and target.canvas is not None and (entry.selects or entry.routes)
    with ExitStack() as closing:
        trial = replace(
            resources,
            open_runner=_stop,
            open_tokenizer=_stop,
            find_head=lambda method, name: _stop_if(resources, method, name),
            prove=at_once,
            closing=closing,
        )
        try:
            drafter = build(parse(name), trial)
            if drafter is not None:
                check(name, drafter.needs)
        except _Found:
            return True
        except (ParlayError, ValueError):
            return False
    return True


def _stop(name: str) -> NoReturn:
    raise _Found(name)


def _stop_if(resources: Resources, method: str, name: str) -> None:
    if resources.find_head is not None and resources.find_head(method, name) is not None:
        raise _Found(name)
