"""Drafters from elsewhere: entry points of the group `GROUP`, or ``package.module:Class`` on the command line.

What such a class offers: the `Drafter` protocol; a constructor ``(resources)``, or ``(resources, options: MyOptions)``
where ``MyOptions`` is a frozen dataclass derived from `parlay.options.Options`, whose fields become the strategy's
parameters; a docstring, whose first line is its summary. A `StrategyEntry` can be named in its place, to say more.
It is imported when it is named.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import typing
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

from parlay.options import Options, UsageError, nearest, options_of
from parlay.strategies.entry import StrategyEntry

GROUP = "parlay.drafters"

_PROTOCOL = ("needs", "propose", "observe", "release")


def installed() -> dict[str, EntryPoint]:
    """Entry points by name; none of them is loaded by this."""
    return {point.name: point for point in entry_points(group=GROUP)}


def from_entry_point(point: EntryPoint) -> StrategyEntry:
    """The entry that an installed package offers under ``point.name``."""
    return replace(from_path(point.value), name=point.name)


def from_path(path: str) -> StrategyEntry:
    """The entry for ``package.module:Class``, or for ``package.module:NAME`` of a `StrategyEntry`.

    Raises UsageError for anything else.
    """
    found = _load(path)
    if isinstance(found, StrategyEntry):
        entry = replace(found, name=path)
    elif inspect.isclass(found):
        entry = _described(path, found)
    else:
        raise UsageError(f"{path} is no drafter class")
    _check_options(path, entry)
    return entry


def _described(path: str, found: type) -> StrategyEntry:
    missing = [name for name in _PROTOCOL if name not in dir(found)]
    if missing:
        raise UsageError(f"{path} is no drafter: it lacks {', '.join(missing)}")
    return StrategyEntry(
        name=path,
        family="third party",
        training="see its documentation",
        needs="see its documentation",
        summary=(inspect.getdoc(found) or "").partition("\n")[0],
        options=_options(path, found),
        factory=path,
    )


def _load(path: str) -> object:
    module_name, _, attribute = path.partition(":")
    try:
        names = _imported(module_name).__dict__
    except (ImportError, ValueError) as error:
        raise UsageError(f"strategy {path}: can't import {module_name!r} ({error})") from error
    if attribute not in names:
        classes = [name for name, value in names.items() if inspect.isclass(value) and value.__module__ == module_name]
        raise UsageError(f"strategy {path}: {module_name} has no {attribute!r}; {nearest(attribute, classes)}")
    return names[attribute]


def _imported(name: str) -> ModuleType:
    """The module; one that is not installed is looked for in the current folder, where an installed command doesn't."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
    here = os.getcwd()
    sys.path.append(here)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(here)


def _options(path: str, found: type) -> type[Options]:
    """The class of the constructor's second argument, ``options``; without one the drafter has no options."""
    _, *others = inspect.signature(found).parameters or ("",)
    if not others:
        return Options
    declared = typing.get_type_hints(found.__init__).get(others[0])  # type: ignore[misc]
    if len(others) > 1 or not (inspect.isclass(declared) and issubclass(declared, Options)):
        raise UsageError(
            f"{path}: its constructor takes {', '.join(others)} after the resources; it must take one argument, "
            "options, annotated with a class derived from parlay.options.Options"
        )
    return declared


def _check_options(path: str, entry: StrategyEntry) -> None:
    try:
        own = options_of(entry.options)
        shared = replace(entry, options=Options).parameters
    except TypeError as error:
        raise UsageError(f"{path}: {error}") from error
    unset = [name for name, option in own.items() if option.required]
    if unset:
        raise UsageError(f"{path}: option {unset[0]!r} needs a default")
    clash = own.keys() & shared.keys()
    if clash:
        raise UsageError(f"{path}: the options {', '.join(sorted(clash))} belong to the budget policy or accept rule")
