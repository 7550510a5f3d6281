"""The built-in sets: a few prompts of each kind, written for this project. They are too small to rank close results."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from parlay.bench.workloads import files
from parlay.bench.workloads.filler import book
from parlay.bench.workloads.item import Item, Message, Workload

PROMPTS = Path(__file__).with_name("prompts.jsonl")
"""In the plain shape; the category is the set."""
LONG = "long"
NAMES = ("edit", "copy", "code", "maths", "translation", "calls", "prose", LONG)

_LONG_ITEMS = 8
_LONG_CHARACTERS = 4500


def load(name: str) -> Workload:
    """One of `NAMES`."""
    items = _long_items() if name == LONG else _written()[name]
    return Workload(name, tuple(items))


@cache
def _written() -> dict[str, list[Item]]:
    sets: dict[str, list[Item]] = {}
    for item in files.read(PROMPTS):
        sets.setdefault(item.category, []).append(item)
    return sets


def _long_items() -> list[Item]:
    """A book of entries, one of which is to be repeated."""
    return [_long_item(number) for number in range(_LONG_ITEMS)]


def _long_item(number: int) -> Item:
    text = book(1000 + number, _LONG_CHARACTERS)
    lines = text.split("\n")
    wanted = lines[(7 * number + 3) % len(lines)].split(".")[0]
    question = f"Here is a carrier's book.\n\n{text}\n\nRepeat {wanted} word for word, and the three after it."
    return Item(id=f"{LONG}-{number}", messages=(Message("user", question),))
