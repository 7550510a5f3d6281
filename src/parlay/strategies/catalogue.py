"""The catalogue of all strategies by name. A strategy has a file for its drafter, and an entry in `entries`.

Every strategy that drafts has ``k``, ``policy`` and ``rule``; its other parameters are its drafter's own options. For
third parties see `plugins`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from parlay.options import UsageError, nearest
from parlay.strategies import plugins
from parlay.strategies.entries import canvases, combined, copying, fixed_point, heads, models, self_speculation, stores
from parlay.strategies.entry import StrategyEntry

_ENTRIES = (
    *fixed_point.ENTRIES,
    *copying.ENTRIES,
    *stores.ENTRIES,
    *self_speculation.ENTRIES,
    *models.ENTRIES,
    *combined.ENTRIES,
    *heads.ENTRIES,
    *canvases.ENTRIES,
)
COMMAND = "parlay strategies"
"""What lists the strategies or, with a name, the parameters of one."""
_BY_NAME = MappingProxyType({entry.name: entry for entry in _ENTRIES})


class Unlisted(UsageError):
    """No strategy has the name ``word``, or no parameter of a strategy: ``known`` are those that there are.

    The message is for users of the command ``command``, which lists the known names; `listed_by` is for others.
    """

    def __init__(self, problem: str, word: str, known: Collection[str], command: str = COMMAND) -> None:
        super().__init__(f"{problem}: {nearest(word, known, command)}")
        self._problem, self._word, self._known = problem, word, known

    def __reduce__(self) -> tuple[type[UsageError], tuple[str, ...]]:
        """Let another process show the error: exceptions are copied by calling their class with the message."""
        return UsageError, (str(self),)

    def listed_by(self, place: str) -> str:
        """The message for a user to whom ``place`` lists the names."""
        return f"{self._problem}: {nearest(self._word, self._known, place)}"


def catalogue() -> Mapping[str, StrategyEntry]:
    """Return the built-in strategies by name, in catalogue order."""
    return _BY_NAME


def for_any_target(*, without: Collection[str]) -> list[str]:
    """List the strategies that work for every autoregressive model and have no parameter of the names in
    ``without``."""
    return [
        name
        for name, entry in _BY_NAME.items()
        if not (entry.selects or entry.fills or entry.family == "diffusion") and not entry.parameters.keys() & without
    ]


def find(name: str) -> StrategyEntry:
    """Find the entry of a name: a built-in one, an entry point of the group `plugins.GROUP`, or
    ``package.module:Class``.

    Raises `Unlisted` for an unknown name, and UsageError for a class that is no drafter.
    """
    if ":" in name:
        return plugins.from_path(name)
    return find_known(name)


def find_known(name: str) -> StrategyEntry:
    """Find the entry of a name that is built in or an entry point; no class can be named. Raises `Unlisted`."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    installed = plugins.installed()
    if name in installed:
        return plugins.from_entry_point(installed[name])
    raise Unlisted(f"unknown strategy {name!r:.100}", name, [*_BY_NAME, *installed])


def listing() -> list[dict[str, Any]]:
    """Return the built-in strategies as plain data for JSON."""
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
                key: {"type": option.type.__name__, "default": option.default, "help": option.help}
                for key, option in entry.parameters.items()
            },
        }
        for entry in _ENTRIES
    ]
