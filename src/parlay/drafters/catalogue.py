"""The catalogue: every strategy by name. A strategy is its own file, and its entry in `families`.

A strategy is asked for as ``NAME[:key=value,...]``; lists are joined by ``+``. Inside another it is written
``NAME(key=value,...)``. Every strategy that drafts takes ``k``, ``policy`` and ``rule``; the others are its own.
Third parties: see `plugins`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol, cast

from parlay.drafters import accept_rules, plugins
from parlay.drafters.entries import Entry, Parameter, Resources, StrategySpec, UsageError, Value, budget, nearest
from parlay.drafters.families import (
    cascades,
    combined,
    copying,
    datastore,
    fixed_point,
    models,
    other_vocabularies,
    plain,
    self_speculation,
    stores,
    trees,
)
from parlay.options import spelling
from parlay.types import Drafter, Rule

__all__ = [
    "Entry",
    "Parameter",
    "Resources",
    "StrategySpec",
    "UsageError",
    "build",
    "build_rule",
    "catalogue",
    "find",
    "listing",
    "members",
    "parse",
    "settings",
]

_ENTRIES = (
    *plain.ENTRIES,
    *copying.ENTRIES,
    *stores.ENTRIES,
    *datastore.ENTRIES,
    *fixed_point.ENTRIES,
    *self_speculation.ENTRIES,
    *models.ENTRIES,
    *other_vocabularies.ENTRIES,
    *trees.ENTRIES,
    *combined.ENTRIES,
    *cascades.ENTRIES,
)
_THIRD_PARTY_BUDGET = 16
_WHOLE = ("policy", accept_rules.RULE)


def catalogue() -> Mapping[str, Entry]:
    """The built-in strategies by name, in the order of the list."""
    return MappingProxyType({entry.name: entry for entry in _ENTRIES})


def find(name: str) -> Entry:
    """The entry of that name: built in, an entry point of the group `plugins.GROUP`, or ``package.module:Class``."""
    known = catalogue()
    if name in known:
        return known[name]
    if ":" in name:
        return plugins.from_path(name, budget(_THIRD_PARTY_BUDGET))
    installed = plugins.installed()
    if name in installed:
        return plugins.from_entry_point(installed[name], budget(_THIRD_PARTY_BUDGET))
    raise UsageError(f"unknown strategy {name!r}: {nearest(name, [*known, *installed])}")


def parse(text: str) -> StrategySpec:
    """Reads ``NAME[:key=value,...]``; UsageError names what is wrong with it and what would be right."""
    complaint = spelling.complaint(text)
    if complaint:
        raise UsageError(f"strategy {text.strip()}: {complaint}")
    spec = _read(text)
    _check_depth(spec)
    return spec


def _read(text: str, inside: bool = False) -> StrategySpec:
    name, rest = _head(text.strip())
    entry = find(name)
    given: dict[str, str] = {}
    for part in spelling.split(rest, ","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise UsageError(f"strategy {name}: expected key=value, got {part!r}")
        if key in given:
            raise UsageError(f"strategy {name}: {key} is given twice")
        if key not in entry.parameters:
            raise UsageError(f"strategy {name} has no parameter {key!r}: {nearest(key, entry.parameters)}")
        if inside and key in _WHOLE:
            raise UsageError(f"strategy {name}: {key} is set for the whole strategy, not for one inside it")
        given[key] = value
    accept_rules.check(name, given, entry.parameters)
    values = {key: _value(entry.parameters[key], f"strategy {name}: {key}", text) for key, text in given.items()}
    unusual = {key: value for key, value in values.items() if value != entry.parameters[key].default}
    return StrategySpec(name, tuple(sorted(unusual.items())))


def _head(text: str) -> tuple[str, str]:
    """Name and settings."""
    called = spelling.call(text)
    if called is not None:
        return called
    name, _, rest = text.partition(":")
    piece, _, after = rest.partition(":")
    if piece and "=" not in piece and name not in catalogue():
        return f"{name}:{piece}", after  # package.module:Class
    return name, rest


def _value(parameter: Parameter, name: str, text: str) -> Value:
    """Strategies inside are read too, so that equal ones are spelled alike."""
    value = parameter.read(name, text)
    if parameter.strategies and isinstance(value, tuple):
        return tuple(_read(one, inside=True).nested for one in value)
    return value


def _check_depth(spec: StrategySpec, depth: int = 1) -> None:
    """Defaults included, so that an entry whose default names itself is found."""
    if depth > spelling.DEPTH:
        raise UsageError(f"strategy {spec.name}: {spelling.TOO_DEEP}")
    for member in members(spec):
        _check_depth(member, depth + 1)


def members(spec: StrategySpec) -> list[StrategySpec]:
    """The strategies that stand directly inside it."""
    parameters = find(spec.name).parameters
    names = [value for key, value in settings(spec).items() if parameters[key].strategies]
    return [_read(text, inside=True) for value in names if isinstance(value, tuple) for text in value]


def settings(spec: StrategySpec) -> dict[str, Value]:
    """Every parameter of the strategy, defaults filled in."""
    defaults = {key: parameter.default for key, parameter in find(spec.name).parameters.items()}
    return defaults | dict(spec.parameters)


class _Factory(Protocol):
    def __call__(self, resources: Resources, **parameters: Value) -> Drafter: ...


def build(spec: StrategySpec, resources: Resources) -> Drafter | None:
    """The drafter that the spec names, or None when it names plain decoding. Budget parameters are the policy's."""
    entry = find(spec.name)
    if not entry.factory:
        return None
    given = settings(spec)
    own = {key: value for key, value in given.items() if key not in budget(0)}
    if entry.draws:
        own[accept_rules.RULE] = given[accept_rules.RULE]
    return resolve(entry.factory)(resources, **own)


def build_rule(spec: StrategySpec) -> Rule:
    """The accept rule that the spec names."""
    return accept_rules.build(settings(spec))


def resolve(factory: str) -> _Factory:
    """The class that ``module:Class`` names."""
    module, _, attribute = factory.partition(":")
    return cast(_Factory, importlib.import_module(module).__dict__[attribute])


def listing() -> list[dict[str, Any]]:
    """The built-in strategies as plain data that JSON can carry."""
    return [
        {
            "name": entry.name,
            "family": entry.family,
            "exactness": str(entry.exactness),
            "training": entry.training,
            "needs": entry.needs,
            "summary": entry.summary,
            "when": entry.when,
            "reference": entry.reference,
            "parameters": {
                key: {"type": parameter.type.__name__, "default": parameter.default, "help": parameter.help}
                for key, parameter in entry.parameters.items()
            },
        }
        for entry in _ENTRIES
    ]
