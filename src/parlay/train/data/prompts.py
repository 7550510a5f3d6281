"""Prompts to train on: read from a file, or written by the target itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parlay.chat_template import render
from parlay.types import ParlayError, Tokenizer

_MARK = "PARLAY"


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """What a model's chat template puts before a user's words and between them and the answer, as token ids."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> ChatFrame:
        """Raises ParlayError for a tokenizer without a chat template, or whose template changes a user's words."""
        if tokenizer is None or not tokenizer.chat_template:
            raise ParlayError("the model has no chat template: give texts of its own with --texts")
        before, mark, after = render(tokenizer, [{"role": "user", "content": _MARK}]).partition(_MARK)
        if not mark:
            raise ParlayError("the model's chat template changes what a user says: give texts of its own with --texts")
        return cls(*(tuple(tokenizer.encode(part, add_special_tokens=False)) for part in (before, after)))

    def around(self, words: Sequence[int]) -> tuple[int, ...]:
        """A prompt for an answer to these words."""
        return (*self.before, *words, *self.after)


def read_prompts(path: Path, *, skip_broken: bool = False) -> list[str]:
    """The prompts in a file of JSON lines, each ``{"prompt": TEXT}``.

    Raises ParlayError for an empty file, and for a broken line unless ``skip_broken``.
    """
    return [prompt for (prompt,) in _read(path, ("prompt",), skip_broken)]


def read_conversations(path: Path, *, skip_broken: bool = False) -> list[tuple[str, str]]:
    """As `read_prompts`, each line ``{"prompt": TEXT, "answer": TEXT}``."""
    return [(prompt, answer) for prompt, answer in _read(path, ("prompt", "answer"), skip_broken)]


def _read(path: Path, keys: Sequence[str], skip_broken: bool) -> list[list[str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ParlayError(f"can't read {path}: {error}") from error
    read = [texts_of(line, keys) for line in lines]
    broken = [number for number, texts in enumerate(read, 1) if texts is None]
    if broken and not skip_broken:
        form = ", ".join(f'"{key}": TEXT' for key in keys)
        raise ParlayError(
            f"{path}: line {broken[0]} is no {{{form}}} ({len(broken)} such lines): mend them or pass --skip-broken"
        )
    found = [texts for texts in read if texts]
    if not found:
        raise ParlayError(f"{path} holds no prompts")
    return found


def texts_of(line: str, keys: Sequence[str]) -> list[str] | None:
    """The texts under these keys in a JSON line; None where one of them is missing or empty."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    texts = [record.get(key) for key in keys] if isinstance(record, dict) else []
    good = [text for text in texts if isinstance(text, str) and text.strip()]
    return good if len(good) == len(keys) else None
