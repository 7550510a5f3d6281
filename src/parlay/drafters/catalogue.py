"""The catalogue: every strategy by name. The one file, beside a drafter's own, in which its name stands.

A strategy is asked for as ``NAME[:key=value,...]``; lists are joined by ``+``. Every strategy that drafts takes ``k``
and ``policy``; the other parameters are its own. Third parties: see `plugins`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol, cast

from parlay.drafters import plugins
from parlay.drafters.entries import Entry, Parameter, Resources, StrategySpec, UsageError, Value, nearest
from parlay.types import Drafter, Exactness

__all__ = [
    "Entry",
    "Parameter",
    "Resources",
    "StrategySpec",
    "UsageError",
    "build",
    "catalogue",
    "find",
    "listing",
    "parse",
    "settings",
]

POLICIES = ("adaptive", "fixed")


def _budget(nodes: int) -> dict[str, Parameter]:
    """The parameters that every drafting strategy takes. They belong to the policy, not to the drafter."""
    return {
        "k": Parameter(int, nodes, "most nodes in a draft", low=0, high=1024),
        "policy": Parameter(str, "adaptive", "draft while it pays, or always k nodes", choices=POLICIES),
    }


_THIRD_PARTY_BUDGET = 16

_ENTRIES = (
    Entry(
        name="none",
        family="plain",
        exactness=Exactness.BITS,
        training="none",
        needs="nothing",
        summary="Plain decoding: one token per step. The yardstick.",
        reference="",
    ),
    Entry(
        name="prompt-lookup",
        family="copy",
        exactness=Exactness.BITS,
        training="none",
        needs="nothing",
        summary="Copies what followed the longest earlier match of the latest tokens, in prompt, output or references.",
        reference="Saxena 2023, prompt lookup decoding, github.com/apoorvumang/prompt-lookup-decoding",
        parameters={
            "max_ngram": Parameter(int, 32, "matches longer than this count as this long", low=1, high=256),
            "min_ngram": Parameter(int, 1, "fewest tokens that must match", low=1, high=256),
            "pick": Parameter(str, "recent", "which occurrence to copy from", choices=("recent", "leftmost")),
            **_budget(31),
        },
        factory="parlay.drafters.prompt_lookup:PromptLookup",
        toys=("", "min_ngram=1,max_ngram=2,pick=leftmost"),
    ),
    Entry(
        name="draft-model",
        family="model",
        exactness=Exactness.BITS,
        training="a small model",
        needs="a model with the target's vocabulary",
        summary="A smaller language model writes ahead, as a chain or as a tree of its best guesses.",
        reference="Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318",
        parameters={
            "model": Parameter(str, "", "draft model, by name or directory; empty: the one that goes with the target"),
            "shape": Parameter(str, "chain", "shape of the drafts", choices=("chain", "tree")),
            "width": Parameter(int, 3, "tree: nodes expanded per forward, and children of each", low=1, high=64),
            "min_p": Parameter(float, 0.1, "stop where the chance of the drafted path falls below this", low=0, high=1),
            **_budget(8),
        },
        factory="parlay.drafters.draft_model:DraftModel",
        toys=("min_p=0", "min_p=0,shape=tree,width=2"),
    ),
    Entry(
        name="union",
        family="combined",
        exactness=Exactness.BITS,
        training="that of its members",
        needs="what its members need",
        summary="Several drafters propose into one tree; each node is credited to the one that proposed it.",
        reference="Miao et al. 2024 (SpecInfer, merged trees), arXiv:2305.09781",
        parameters={
            "of": Parameter(tuple, ("prompt-lookup", "draft-model"), "the drafters, joined by +"),
            **_budget(16),
        },
        factory="parlay.drafters.union:Union",
    ),
)


def catalogue() -> Mapping[str, Entry]:
    """The built-in strategies by name, in the order of the list."""
    return MappingProxyType({entry.name: entry for entry in _ENTRIES})


def find(name: str) -> Entry:
    """The entry of that name: built in, an entry point of the group `plugins.GROUP`, or ``package.module:Class``."""
    known = catalogue()
    if name in known:
        return known[name]
    if ":" in name:
        return plugins.from_path(name, _budget(_THIRD_PARTY_BUDGET))
    installed = plugins.installed()
    if name in installed:
        return plugins.from_entry_point(installed[name], _budget(_THIRD_PARTY_BUDGET))
    raise UsageError(f"unknown strategy {name!r}: {nearest(name, [*known, *installed])}")


def parse(text: str) -> StrategySpec:
    """Reads ``NAME[:key=value,...]``; UsageError names what is wrong with it and what would be right."""
    name, _, rest = text.strip().partition(":")
    piece, _, after = rest.partition(":")
    if piece and "=" not in piece and name not in catalogue():
        name, rest = f"{name}:{piece}", after  # package.module:Class
    entry = find(name)
    given: dict[str, Value] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise UsageError(f"strategy {name}: expected key=value, got {part!r}")
        if key in given:
            raise UsageError(f"strategy {name}: {key} is given twice")
        if key not in entry.parameters:
            raise UsageError(f"strategy {name} has no parameter {key!r}: {nearest(key, entry.parameters)}")
        given[key] = entry.parameters[key].read(f"strategy {name}: {key}", value)
    unusual = {key: value for key, value in given.items() if value != entry.parameters[key].default}
    return StrategySpec(name, tuple(sorted(unusual.items())))


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
    own = {key: value for key, value in settings(spec).items() if key not in _budget(0)}
    return resolve(entry.factory)(resources, **own)


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
            "reference": entry.reference,
            "parameters": {
                key: {"type": parameter.type.__name__, "default": parameter.default, "help": parameter.help}
                for key, parameter in entry.parameters.items()
            },
        }
        for entry in _ENTRIES
    ]
