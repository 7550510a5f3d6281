"""Loads workloads: small built-in sets, published sets, and users' files in the formats of published sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from parlay.bench.workloads import files, sets
from parlay.bench.workloads.files import read_prompts
from parlay.bench.workloads.shapes import Item, Message, Workload

__all__ = ["BUILT_IN", "DATA_SETS", "SPEED_BENCH", "Item", "Message", "Workload", "load", "read_prompts"]

BUILT_IN = sets.NAMES
DATA_SETS = tuple(sets.FILES)
SPEED_BENCH = sets.SPEED_BENCH


def load(names: Sequence[str], most: int | None = None, data: Path | None = None) -> list[Workload]:
    """Load workloads by name: a built-in one, a published set, a file's path, or ``NAME=PATH``.

    Each workload gets at most ``most`` items. Published sets are read from the folder ``data``. If records have a
    category, each category is a workload called ``NAME/CATEGORY``, and may be loaded by that name.

    Raises ValueError for an unknown name, for a file that can't be read or whose records have no known format (with the
    number of the line), and for two workloads of one name.
    """
    found: list[Workload] = []
    for name in names:
        if not name.strip():
            raise ValueError("a workload has no name: join names by commas, or remove the flag")
        found += [sets.load(name)] if name in BUILT_IN else _from_file(name, data)
    twice = {workload.name for workload in found if sum(workload.name == other.name for other in found) > 1}
    if twice:
        raise ValueError(f"two workloads are called {min(twice)}: give one another name, as in NAME=PATH")
    return [replace(workload, items=workload.items[:most]) for workload in found]


def _from_file(text: str, data: Path | None) -> list[Workload]:
    name, _, category = text.partition("/")
    if name not in DATA_SETS:
        name, equals, place = text.rpartition("=")
        path = Path(place)
        return _by_category(name if equals else files.stem(path), _existing(path, text))
    found = _by_category(name, sets.find(name, data))
    chosen = [workload for workload in found if not category or workload.name == text]
    if not chosen:
        raise ValueError(f"no workload {text!r}: {name} holds {', '.join(workload.name for workload in found)}")
    return chosen


def _existing(path: Path, text: str) -> Path:
    if not path.exists():
        known = f"built in ({', '.join(BUILT_IN)}) nor published ({', '.join(DATA_SETS)})"
        raise ValueError(f"no workload {text!r}: it is neither {known} nor a file")
    return path


def _by_category(name: str, path: Path) -> list[Workload]:
    by_category: dict[str, list[Item]] = {}
    for item in files.read_prompts(path):
        by_category.setdefault(item.category, []).append(item)
    return [
        Workload(f"{name}/{category}" if category else name, tuple(items)) for category, items in by_category.items()
    ]
