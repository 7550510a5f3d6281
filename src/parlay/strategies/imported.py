"""Imports a drafter, a budget policy or an accept rule that a strategy names as ``package.module:NAME``.

A module that is not installed is looked for in the current folder. A request to a server can't import anything.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar, cast

from parlay.options import UsageError, nearest
from parlay.types import AcceptRule, Cost, ParlayError, Policy, kind_and_message, place_of

_POLICY = ("plan", "next_budgets", "trim", "learn", "report", "release")
_RULE = ("exactness", "kinds", "matches", "accept")

T = TypeVar("T")


def load(path: str) -> object:
    """Import the object that ``package.module:NAME`` names. Raises UsageError if there is none."""
    module_name, _, attribute = path.partition(":")
    if not all(map(str.isidentifier, module_name.split("."))):
        raise UsageError(f"strategy {path}: {module_name!r} is not the name of a module; write package.module:Class")
    try:
        names = _imported(module_name).__dict__
    except (ImportError, ValueError) as error:
        raise UsageError(f"strategy {path}: can't import {module_name!r} ({error})") from error
    if attribute not in names:
        classes = [name for name, value in names.items() if inspect.isclass(value) and value.__module__ == module_name]
        raise UsageError(f"strategy {path}: {module_name} has no {attribute!r}; {nearest(attribute, classes)}")
    return names[attribute]


def policy(path: str, budget: int, cost: Cost) -> Policy:
    """Make the budget policy of class ``path``, which is called with ``budget`` and ``cost``.

    Raises UsageError if the class is not a policy.
    """
    made = _called(path, "budget policy", _POLICY, budget, cost)
    return cast(Policy, made)


def is_rule(path: str) -> bool:
    """Whether ``path`` names an accept rule or its class. Raises UsageError if it names nothing."""
    return set(_RULE) <= set(dir(load(path)))


def rule(path: str) -> AcceptRule:
    """Make an accept rule by calling the class that ``path`` names, without arguments; or return the rule that it
    names.

    Raises UsageError for anything else, and for a rule that judges several kinds of drafts.
    """
    made = cast(AcceptRule, _called(path, "accept rule", _RULE))
    if len(made.kinds) != 1:
        raise UsageError(f"{path} judges drafts of {len(made.kinds)} kinds: it must name one in its attribute kinds")
    return made


def _called(path: str, purpose: str, names: tuple[str, ...], *arguments: object) -> object:
    found = load(path)
    missing = [name for name in names if name not in dir(found)]
    if missing:
        raise UsageError(f"{path} is no {purpose}: it lacks {', '.join(missing)}")
    if not inspect.isclass(found):
        return found
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as error:
        given = "budget and cost" if arguments else "no arguments"
        raise UsageError(f"{path}: its constructor is called with {given} ({error})") from None
    return made(path, lambda: found(*arguments))


def made(path: str, make: Callable[[], T]) -> T:
    """Call ``make``, the constructor of a class that is not Parlay's. Raises UsageError, in one line, if it fails."""
    try:
        return make()
    except ParlayError:
        raise
    except Exception as error:
        raise UsageError(f"{path}: its constructor failed at {place_of(error)} ({kind_and_message(error)})") from error


def _imported(name: str) -> ModuleType:
    """Import a module, also from the current folder: Python does not search that folder for an installed command."""
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
