"""Prompts to train on, and prompts with answers, read from files; and the chat template that goes around them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parlay.bench import workloads
from parlay.system.terminal import counted
from parlay.text.chat_template import render
from parlay.types import ParlayError, Tokenizer

_MARK = "PARLAY"


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """The token ids that a model's chat template puts before a user's words, and between these and the answer."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> ChatFrame:
        """Take a tokenizer's chat template apart.

        Raises ParlayError if it has no chat template, or one that changes the user's words.
        """
        if tokenizer is None or not tokenizer.chat_template:
            raise ParlayError("the model has no chat template: give prompts with --prompts, or texts with --texts")
        before, mark, after = render(tokenizer, [{"role": "user", "content": _MARK}]).partition(_MARK)
        if not mark:
            raise ParlayError(
                "the model's chat template changes what a user says: give texts as parlay serve --record keeps them"
            )
        return cls(*(tuple(tokenizer.encode(part, add_special_tokens=False)) for part in (before, after)))

    @classmethod
    def of_prompts(cls, tokenizer: Tokenizer | None) -> ChatFrame:
        """Like `of`, but without a chat template return what the tokenizer puts around every text, e.g. separators."""
        if tokenizer is None or tokenizer.chat_template:
            return cls.of(tokenizer)
        whole, words = (tokenizer.encode(_MARK, add_special_tokens=special) for special in (True, False))
        starts = range(len(whole) - len(words) + 1)
        first = next((at for at in starts if whole[at : at + len(words)] == words), None)
        return cls((), ()) if first is None else cls(tuple(whole[:first]), tuple(whole[first + len(words) :]))

    def around(self, words: Sequence[int]) -> tuple[int, ...]:
        """Return the prompt that asks for an answer to these words."""
        return (*self.before, *words, *self.after)


@dataclass(frozen=True, slots=True)
class PromptAndAnswer:
    """A user's words and a model's reply.

    If ``framed``, both already include the model's chat template, as `parlay serve --record` writes them.
    """

    prompt: str
    answer: str
    framed: bool = False


def read_prompts(path: Path, *, skip_broken: bool = False) -> list[str]:
    """Read the first user message of each item of a prompt file, in the formats of `parlay.bench.workloads`.

    Raises ParlayError for a file without prompts, for recorded traffic, and for a broken line unless ``skip_broken``.
    """
    broken: list[str] = []
    try:
        items = list(workloads.read_prompts(path, broken))
    except ValueError as error:
        raise ParlayError(broken[0] if broken and not skip_broken else str(error)) from error
    if broken:
        refuse_broken(broken[0], len(broken), skip_broken)
    if any(item.framed for item in items):
        raise ParlayError(f"{path} holds recorded traffic, whose prompts are in a model's template: give it by --texts")
    words = [next((each.content for each in item.messages if each.role == "user"), item.prompt) for item in items]
    return [each for each in words if each.strip()]


def read_conversations(path: Path, *, skip_broken: bool = False) -> list[PromptAndAnswer]:
    """Read conversations: recorded traffic, or JSON lines ``{"prompt": TEXT, "answer": TEXT}``.

    Raises ParlayError for a file without conversations, and for a broken line unless ``skip_broken``.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ParlayError(f"can't read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ParlayError(f"can't read {path}: it is not UTF-8 (byte {error.start}): convert it first") from error
    each = {number: conversation_of(line) for number, line in enumerate(lines, 1) if line.strip()}
    broken = [number for number, found in each.items() if found is None]
    if broken:
        first = f'{path}: line {broken[0]} is no {{"prompt": TEXT, "answer": TEXT}}'
        refuse_broken(first, len(broken), skip_broken)
    good = [found for found in each.values() if found is not None]
    if not good:
        raise ParlayError(f"{path} holds no conversations")
    return good


def refuse_broken(first: str, count: int, skip_broken: bool) -> None:
    """Raise ParlayError about a file's broken lines, or print how many are left out if ``skip_broken``.

    ``first`` says what is wrong with the first of them.
    """
    many = counted(count, "such line")
    if not skip_broken:
        raise ParlayError(f"{first} ({many}): mend that or pass --skip-broken")
    print(f"{first}; left out: {many}", flush=True)


def conversation_of(line: str) -> PromptAndAnswer | None:
    """Read the conversation of a JSON line; None if prompt or answer is missing or empty."""
    record = _record(line)
    prompt, answer = _text(record, "prompt"), _text(record, "answer")
    return PromptAndAnswer(prompt, answer, record.get("framed") is True) if prompt and answer else None


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _text(record: dict[str, Any], key: str) -> str:
    """Return the value of ``key``; empty if it is missing, blank or no text."""
    text = record.get(key)
    return text if isinstance(text, str) and text.strip() else ""
