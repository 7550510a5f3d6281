"""What a user's own requests look like: prompts, and the answers to them where these were recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from parlay.bench.replay.answers import OUTPUTS, RecordedAnswer, read_answers
from parlay.bench.workloads import Item, Message, read_prompts
from parlay.bench.workloads.files import COMPRESSED, records

PROMPTS = 16
"""Prompts that are decoded, the first ones of a file."""
ANSWERS = 200
"""Recorded answers that are replayed, the first ones of a file. A replay runs no model."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The first requests of a file. ``answers`` is empty where none were recorded."""

    name: str
    prompts: tuple[Item, ...]
    answers: tuple[RecordedAnswer, ...] = ()


def read_traffic(path: Path) -> Traffic:
    """Prompts as `read_prompts` takes them, or recorded answers as `read_answers` does.

    Raises ValueError for a file that can't be read, holds none, or is neither.
    """
    if not _recorded(path):
        return Traffic(str(path), tuple(islice(read_prompts(path), PROMPTS)))
    answers = tuple(islice((each for each in read_answers(path) if each.prompt and each.output), ANSWERS))
    if not answers:
        raise ValueError(f"{path} holds no recorded answer with any text")
    prompts = (Item(id=str(place), messages=(Message("user", each.prompt),)) for place, each in enumerate(answers))
    return Traffic(str(path), tuple(islice(prompts, PROMPTS)), answers)


def _recorded(path: Path) -> bool:
    """Whether the first record has an answer; all others must have one then."""
    if not path.name.endswith((".jsonl", ".json", *COMPRESSED)):
        return False
    _, first = next(records(path), ("", None))
    return isinstance(first, Mapping) and bool({*OUTPUTS, "result"} & first.keys())
