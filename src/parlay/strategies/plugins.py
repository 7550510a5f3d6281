"""Drafters of third parties: entry points of the group `GROUP`, or ``package.module:Class`` on the command line.

Such a class implements the `Drafter` protocol. Its constructor takes ``(resources)``, or ``(resources, options:
MyOptions)``, where ``MyOptions`` is a frozen dataclass derived from `parlay.options.Options`; the fields become the
strategy's parameters. The first line of its docstring is the strategy's summary. A `StrategyEntry` may be given instead
of a class, to describe the strategy further. The class or entry is imported when a strategy names it.
"""

from __future__ import annotations

import inspect
import typing
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points

from parlay.options import Options, UsageError, options_of
from parlay.strategies.entry import StrategyEntry
from parlay.strategies.imported import load

GROUP = "parlay.drafters"

_PROTOCOL = ("needs", "propose", "observe", "release")


def installed() -> dict[str, EntryPoint]:
    """Return the entry points by name, without loading them."""
    return {point.name: point for point in entry_points(group=GROUP)}


def from_entry_point(point: EntryPoint) -> StrategyEntry:
    """Return the entry that an installed package offers as ``point.name``."""
    return replace(from_path(point.value), name=point.name)


def from_path(path: str) -> StrategyEntry:
    """Return the entry for ``package.module:Class``, or the `StrategyEntry` at ``package.module:NAME``.

    Raises UsageError if the object is neither, or is invalid.
    """
    found = load(path)
    if isinstance(found, StrategyEntry):
        entry = replace(found, name=path)
    elif inspect.isclass(found):
        entry = _described(path, found)
    else:
        raise UsageError(f"{path} is not a drafter class")
    _check_options(path, entry)
    return entry


def _described(path: str, found: type) -> StrategyEntry:
    missing = [name for name in _PROTOCOL if name not in dir(found)]
    if missing:
        raise UsageError(f"{path} is not a drafter: it lacks {', '.join(missing)}")
    return StrategyEntry(
        name=path,
        family="third party",
        training="see its documentation",
        needs="see its documentation",
        summary=(inspect.getdoc(found) or "").partition("\n")[0],
        options=_options(path, found),
        factory=path,
    )


def _options(path: str, found: type) -> type[Options]:
    """Return the class of the constructor's second argument, ``options``; `Options` if there is no such argument."""
    taken = inspect.signature(found).parameters
    if not taken:
        raise UsageError(f"{path}: its constructor takes nothing; it must take the resources")
    _, *others = taken
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
