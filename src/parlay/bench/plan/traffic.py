"""What a user's own requests look like: prompts, and the answers to them where these were recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from parlay.bench.replay.answers import OUTPUTS, SHAPES, RecordedAnswer, read_answers
from parlay.bench.workloads.files import COMPRESSED, records

PROMPTS = 16
"""Prompts that are decoded, the first ones of a file."""
ANSWERS = 200
"""Recorded answers that are replayed, the first ones of a file. A replay runs no model."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The first requests of a file. ``answers`` is empty where none were recorded."""

    name: str
    prompts: tuple[str, ...]
    answers: tuple[RecordedAnswer, ...] = ()


def read_traffic(path: Path) -> Traffic:
    """A prompt a line; or JSON, also compressed: ``{"prompt": TEXT}``, or recorded answers as `read_answers` has them.

    Raises ValueError for a file that can't be read, holds none, or is neither.
    """
    if not path.name.endswith((".jsonl", ".json", *COMPRESSED)):
        return _some(path, _lines(path))
    if _recorded(path):
        answers = tuple(islice((each for each in read_answers(path) if each.prompt and each.output), ANSWERS))
        return replace(_some(path, [each.prompt for each in answers]), answers=answers)
    return _some(path, _asked(path))


def _some(path: Path, prompts: list[str]) -> Traffic:
    if not prompts:
        raise ValueError(f"--prompts {path} holds no prompts: give one on each line, or JSON lines with {SHAPES}")
    return Traffic(str(path), tuple(prompts[:PROMPTS]))


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {path} can't be read: {error}") from None


def _recorded(path: Path) -> bool:
    """Whether the first record has an answer; all others must have one then."""
    _, first = next(records(path), ("", None))
    return isinstance(first, Mapping) and bool({*OUTPUTS, "result"} & first.keys())


def _asked(path: Path) -> list[str]:
    found: list[str] = []
    for where, record in islice(records(path), PROMPTS):
        prompt = record.get("prompt") if isinstance(record, Mapping) else None
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f'--prompts {path}, {where}: no {{"prompt": TEXT}}, and no recorded answer: {SHAPES}')
        found.append(prompt)
    return found
