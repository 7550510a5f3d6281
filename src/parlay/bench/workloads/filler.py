"""Filler text of any length that does not repeat itself: entries of an invented carrier's book, made by rule."""

from __future__ import annotations

import random
from collections.abc import Iterator

_PEOPLE = ("Anna Weber", "Tom Harding", "Elena Novak", "Paul Martin", "Ruth Okafor", "Ivan Petrov", "Mary Quill")
_DID = ("carried", "sold", "counted", "lost", "mended", "weighed", "sent back", "asked for")
_GOODS = ("apples", "candles", "copper pots", "wool blankets", "ink", "clocks", "oars", "seed potatoes", "letters")
_KEPT = ("crates", "boxes", "baskets", "sacks", "loads")
_PLACES = ("the mill", "the harbour", "the school", "the north gate", "the old bridge", "the market", "the ferry")
_MONTHS = ("January", "March", "April", "June", "August", "September", "November")
_ENDS = (
    "It rained until noon.",
    "Nobody asked why.",
    "The road was bad that day.",
    "Half of it was paid at once.",
    "The rest was left for another week.",
    "The dog had to wait outside.",
    "All of it was written down twice.",
)


def entries(seed: int) -> Iterator[str]:
    """An endless series of entries; the same for the same seed on every machine."""
    rng = random.Random(seed)
    number = 0
    while True:
        number += rng.randint(1, 9)
        yield (
            f"Entry {number}. On {rng.randint(1, 28)} {rng.choice(_MONTHS)} {rng.choice(_PEOPLE)} {rng.choice(_DID)} "
            f"{rng.randint(2, 90)} {rng.choice(_KEPT)} of {rng.choice(_GOODS)} at {rng.choice(_PLACES)}, for "
            f"{rng.randint(3, 400)} pence. {rng.choice(_ENDS)}"
        )


def book(seed: int, characters: int) -> str:
    """Whole entries, one to a line, until there are so many characters."""
    lines: list[str] = []
    length = 0
    for entry in entries(seed):
        if length >= characters:
            break
        lines.append(entry)
        length += len(entry) + 1
    return "\n".join(lines)
