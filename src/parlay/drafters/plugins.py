"""Drafters from elsewhere: entry points of the group `GROUP`, or ``package.module:Class`` on the command line.

What such a class offers: the `Drafter` protocol; a constructor ``(resources, *, name: type = default, ...)`` whose
typed keyword parameters (int, float, bool, str, tuple[str, ...]) become the strategy's parameters; a docstring, whose
first line is its summary. Whoever wants to say more names an `Entry` instead of a class. It is imported when named.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points

from parlay.drafters.entries import Entry, Parameter, UsageError, Value, nearest
from parlay.types import Exactness

GROUP = "parlay.drafters"

_PROTOCOL = ("needs", "propose", "observe", "release")
_TYPES: Mapping[object, type] = {int: int, float: float, bool: bool, str: str, tuple[str, ...]: tuple}


def installed() -> dict[str, EntryPoint]:
    """Entry points by name; none of them is loaded by this."""
    return {point.name: point for point in entry_points(group=GROUP)}


def from_entry_point(point: EntryPoint, budget: Mapping[str, Parameter]) -> Entry:
    """The entry that an installed package offers under ``point.name``."""
    return replace(from_path(point.value, budget), name=point.name)


def from_path(path: str, budget: Mapping[str, Parameter]) -> Entry:
    """The entry for ``package.module:Class`` (or ``:NAME`` of an `Entry`), ``budget`` added to its parameters."""
    found = _load(path)
    if isinstance(found, Entry):
        return replace(found, name=path, parameters={**found.parameters, **budget})
    if not inspect.isclass(found):
        raise UsageError(f"{path} is no drafter class")
    missing = [name for name in _PROTOCOL if name not in dir(found)]
    if missing:
        raise UsageError(f"{path} is no drafter: it lacks {', '.join(missing)}")
    own = _parameters(path, found)
    clash = own.keys() & budget.keys()
    if clash:
        raise UsageError(f"{path}: the parameters {', '.join(sorted(clash))} belong to the budget policy")
    return Entry(
        name=path,
        family="third party",
        exactness=Exactness.BITS,
        training="see its documentation",
        needs="see its documentation",
        summary=(inspect.getdoc(found) or "").partition("\n")[0],
        reference="",
        parameters={**own, **budget},
        factory=path,
    )


def _load(path: str) -> object:
    module_name, _, attribute = path.partition(":")
    try:
        names = importlib.import_module(module_name).__dict__
    except (ImportError, ValueError) as error:
        raise UsageError(f"strategy {path}: can't import {module_name!r} ({error})") from error
    if attribute not in names:
        classes = [name for name, value in names.items() if inspect.isclass(value)]
        raise UsageError(f"strategy {path}: {module_name} has no {attribute!r}; {nearest(attribute, classes)}")
    return names[attribute]


def _parameters(path: str, found: type) -> dict[str, Parameter]:
    """The keyword parameters of the constructor; the first one, the resources, is not among them."""
    signature = inspect.signature(found)
    hints = typing.get_type_hints(found.__init__)  # type: ignore[misc]
    result: dict[str, Parameter] = {}
    for parameter in list(signature.parameters.values())[1:]:
        declared = _TYPES.get(hints.get(parameter.name))
        if declared is None or parameter.default is inspect.Parameter.empty:
            raise UsageError(
                f"{path}: parameter {parameter.name!r} needs a default and a type of "
                "int, float, bool, str or tuple[str, ...]"
            )
        default: Value = parameter.default
        result[parameter.name] = Parameter(declared, default, "")
    return result
