"""Writes questions that have one correct answer: letters to copy, reverse, sort or replace; fields of records; sums."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

LETTERS = "abcdefghijkl"
LENGTH = 6
KINDS = ("copy", "reverse", "sort", "replace")
FIELDS = {
    "name": ("anna", "peter", "maria", "john", "lucy", "mark"),
    "city": ("rome", "paris", "london", "berlin", "madrid", "vienna"),
    "color": ("red", "blue", "green", "black", "white", "brown"),
    "animal": ("horse", "mouse", "dog", "cat", "cow", "sheep"),
    "month": ("june", "march", "april", "may", "july", "october"),
    "food": ("bread", "rice", "soup", "cheese", "apple", "cake"),
    "metal": ("gold", "iron", "silver", "copper", "zinc", "lead"),
    "tree": ("oak", "pine", "elm", "birch", "maple", "willow"),
}
ADDENDS = 4
TOKENS = {"lookup": 20, "json": 64, "sums": 48}
"""The longest answer in tokens, for each kind of the mixed trace."""
EXACT = "sums"
"""The kind whose requests must be decoded exactly."""


def task(chance: random.Random) -> dict[str, str]:
    """Make one question and its only correct answer."""
    kind, letters = chance.choice(KINDS), chance.choices(LETTERS, k=LENGTH)
    said = {
        "copy": letters,
        "reverse": letters[::-1],
        "sort": sorted(letters),
        "replace": ["m" if letter == letters[0] else letter for letter in letters],
    }
    return {"kind": kind, "prompt": f"{kind}: {' '.join(letters)} =", "answer": " " + " ".join(said[kind])}


def extraction(chance: random.Random, kind: str) -> dict[str, str]:
    """Ask for a record's fields in another order, as values (lookup) or as JSON. Parallel decoding can write such an
    answer at once."""
    record = {name: chance.choice(FIELDS[name]) for name in chance.sample(sorted(FIELDS), len(FIELDS))}
    wanted = chance.sample(sorted(FIELDS), len(FIELDS))
    given, asked = ", ".join(f"{name} {value}" for name, value in record.items()), ", ".join(wanted)
    found = {name: record[name] for name in wanted}
    said = json.dumps(found) if kind == "json" else f"{', '.join(found.values())}."
    verb = "json" if kind == "json" else "find"
    return {"kind": kind, "prompt": f"record: {given}. {verb} {asked}:", "answer": f" {said}"}


def sums(chance: random.Random) -> dict[str, str]:
    """Ask for a sum whose answer adds one number at a time, so each step needs the result of the step before."""
    first, *others = [chance.randint(1, 9) for _ in range(ADDENDS)]
    steps = list[str]()
    total = first
    for other in others:
        steps.append(f"{total} + {other} = {total + other}")
        total += other
    asked = " + ".join(map(str, (first, *others)))
    return {"kind": "sums", "prompt": f"sum: {asked}:", "answer": f" {', '.join(steps)}."}


def write_mixed(options: argparse.Namespace) -> None:
    """Write requests whose kinds are drawn at random, and ``calibrate.jsonl``: prompts of further look-ups and JSON."""
    chance = random.Random(options.seed)
    kinds = sorted(TOKENS)

    def make() -> dict[str, str]:
        kind = chance.choice(kinds)
        return sums(chance) if kind == EXACT else extraction(chance, kind)

    write_rows(options.folder, options.count, options.held, make)
    known = (options.folder / "train.jsonl").read_text() + (options.folder / "held.jsonl").read_text()
    others = (extraction(chance, ("lookup", "json")[n % 2])["prompt"] for n in range(400))
    prompts = [each for each in others if json.dumps(each) not in known]
    lines = [json.dumps({"prompt": each}) + "\n" for each in prompts[:300]]
    (options.folder / "calibrate.jsonl").write_text("".join(lines), encoding="utf-8")


def write_tasks(options: argparse.Namespace) -> None:
    """Write letter questions of all `KINDS`."""
    chance = random.Random(options.seed)
    write_rows(options.folder, options.count, options.held, lambda: task(chance))


def write_rows(folder: Path, count: int, held: int, make: Callable[[], dict[str, str]]) -> None:
    """Write ``train.jsonl`` and ``held.jsonl``. No question is in both."""
    seen = dict[str, dict[str, str]]()
    while len(seen) < count + held:
        each = make()
        seen[each["prompt"]] = each
    rows = list(seen.values())
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[:count]), ("held", rows[count:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
