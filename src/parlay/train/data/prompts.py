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
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ParlayError(f"can't read prompts from {path}: {error}") from error
    read = [_prompt(line) for line in lines]
    broken = [number for number, prompt in enumerate(read, 1) if prompt is None]
    if broken and not skip_broken:
        raise ParlayError(
            f'{path}: line {broken[0]} is no {{"prompt": TEXT}} ({len(broken)} such lines): '
            "mend them or pass --skip-broken"
        )
    prompts = [prompt for prompt in read if prompt]
    if not prompts:
        raise ParlayError(f"{path} holds no prompts")
    return prompts


def _prompt(line: str) -> str | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    prompt = record.get("prompt") if isinstance(record, dict) else None
    return prompt if isinstance(prompt, str) and prompt.strip() else None
