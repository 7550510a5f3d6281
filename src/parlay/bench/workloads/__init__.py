"""What is asked of the models: small sets that ship here, and files in the shapes that benchmarks are published in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from parlay.bench.workloads import builtin, files
from parlay.bench.workloads.item import Item, Message, Workload

__all__ = ["BUILT_IN", "Item", "Message", "Workload", "load"]

BUILT_IN = builtin.NAMES


def load(names: Sequence[str], most: int | None = None) -> list[Workload]:
    """Workloads by name: a built-in one, a file's path, or ``NAME=PATH``; of each at most ``most`` items.

    A file whose records name a category makes a workload of each, called ``NAME/CATEGORY``.
    Raises ValueError for a name that is neither, for a file that can't be read or holds something else (with the
    number of the line), and for two workloads of one name.
    """
    found: list[Workload] = []
    for name in names:
        found += [builtin.load(name)] if name in BUILT_IN else _from_file(name)
    twice = {workload.name for workload in found if sum(workload.name == other.name for other in found) > 1}
    if twice:
        raise ValueError(f"two workloads are called {min(twice)}: give one another name, as in NAME=PATH")
    return [replace(workload, items=workload.items[:most]) for workload in found]


def _from_file(text: str) -> list[Workload]:
    name, equals, place = text.rpartition("=")
    path = Path(place)
    if not equals:
        name = files.stem(path)
    if not path.exists():
        known = ", ".join(BUILT_IN)
        raise ValueError(f"no workload {text!r}: it is neither built in ({known}) nor a file")
    by_category: dict[str, list[Item]] = {}
    for item in files.read(path):
        by_category.setdefault(item.category, []).append(item)
    if not by_category:
        raise ValueError(f"{path} holds no prompts")
    return [
        Workload(f"{name}/{category}" if category else name, tuple(items)) for category, items in by_category.items()
    ]
