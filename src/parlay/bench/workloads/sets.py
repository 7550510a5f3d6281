"""Sets of prompts: built-in ones, with a few prompts of each kind, and published ones.

The built-in prompts were written for this project. They are too few to compare strategies of about equal speed. Filler
text of any length consists of random entries in the book of an invented carrier, which do not repeat themselves.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from parlay.bench.workloads import files
from parlay.bench.workloads.shapes import Item, Message, Workload

PROMPTS = Path(__file__).with_name("prompts.jsonl")
"""The built-in prompts, in the plain shape. A prompt's category names its set."""
LONG = "long"
NAMES = ("edit", "copy", "code", "maths", "translation", "calls", "prose", LONG)

_LONG_ITEMS = 8
_LONG_CHARACTERS = 4500


def load(name: str) -> Workload:
    """Return the built-in workload of this name, one of `NAMES`."""
    items = list(map(_long_item, range(_LONG_ITEMS))) if name == LONG else _written()[name]
    return Workload(name, tuple(items))


@cache
def _written() -> dict[str, list[Item]]:
    sets: dict[str, list[Item]] = {}
    for item in files.read(PROMPTS):
        sets.setdefault(item.category, []).append(item)
    return sets


def _long_item(number: int) -> Item:
    text = book(1000 + number, _LONG_CHARACTERS)
    lines = text.split("\n")
    wanted = lines[(7 * number + 3) % len(lines)].split(".")[0]
    question = f"Here is a carrier's book.\n\n{text}\n\nRepeat {wanted} word for word, and the three after it."
    return Item(id=f"{LONG}-{number}", messages=(Message("user", question),))


SPEED_BENCH = "speed-bench"
"""The prompts of this set have a licence of their own, so most folders of published sets lack it."""
FILES: Mapping[str, str] = {
    "spec-bench": "spec-bench/question.jsonl",
    SPEED_BENCH: "speed-bench/qualitative.jsonl",
    "mt-bench": "mt-bench/mt_bench_question.jsonl",
    "editeval": "editeval/edit_eval.jsonl",
    "humaneval": "humaneval/HumanEval.jsonl.gz",
    "bfcl-simple": "bfcl/BFCL_v4_simple_python.jsonl.zst",
    "bfcl-multiple": "bfcl/BFCL_v4_multiple.jsonl.zst",
    "bfcl-parallel": "bfcl/BFCL_v4_parallel.jsonl.zst",
    "llma-summaries": "llma-reference/cnndm.jsonl",
    "llma-questions": "llma-reference/rag.jsonl",
}
"""The path of each published set's file in the folder of sets, by name."""


def find(name: str, data: Path | None) -> Path:
    """Return the path of a published set's file. Raises ValueError if no folder is given or if it lacks the file."""
    if data is None:
        raise ValueError(f"the workload {name} needs --data DIR, a folder that holds {FILES[name]}")
    path = data / FILES[name]
    if not path.exists():
        raise ValueError(f"the workload {name} needs {FILES[name]}, which is not in {data}")
    return path


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
    """Yield entries of the book without end. The same seed gives the same entries on every machine."""
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
    """Return whole entries, one on each line, with at least ``characters`` characters together."""
    lines: list[str] = []
    length = 0
    for entry in entries(seed):
        if length >= characters:
            break
        lines.append(entry)
        length += len(entry) + 1
    return "\n".join(lines)
