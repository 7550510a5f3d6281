"""Reasoning that models write before an answer, between `<think>` and `</think>`: where it begins and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from parlay.types import Tokenizer

BEGIN = "<think>"
END = "</think>"

Thoughts = Literal["none", "maybe", "begun"]
"""Whether an answer has reasoning; ``begun``: the prompt holds the mark that begins it."""

_LAST = 8
"""Tokens at the end of a prompt in which reasoning may begin or end."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The ids of both marks. ``begin`` None: the prompt holds it already."""

    begin: int | None
    end: int


def reasons(template: str) -> bool:
    """Whether a chat template is of a family that writes its reasoning between these marks."""
    return END in template


def thoughts_after(prompt_end: str) -> Thoughts:
    """Whether the answer to a prompt of such a family has reasoning. The end of the prompt tells."""
    if prompt_end.rstrip().endswith(BEGIN):
        return "begun"
    return "none" if END in prompt_end.rpartition(BEGIN)[2] else "maybe"


def expected_thoughts(tokenizer: Tokenizer, prompt: Sequence[int]) -> Thoughts:
    """Whether the answer to a conversation, whose ids these are, has reasoning."""
    if not reasons(template_text(tokenizer)):
        return "none"
    return thoughts_after(tokenizer.decode(list(prompt[-_LAST:]), skip_special_tokens=False))


def template_text(tokenizer: Tokenizer) -> str:
    """The chat templates as one text, to see what they know of; empty where there is none."""
    templates = tokenizer.chat_template
    return "\n".join(templates.values()) if isinstance(templates, dict) else templates or ""


def marks(tokenizer: Tokenizer, thoughts: Thoughts) -> Marks | None:
    """The marks of reasoning that may come; None where none can, or where a mark is not one token."""
    vocabulary = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
    if thoughts == "none" or END not in vocabulary or (thoughts == "maybe" and BEGIN not in vocabulary):
        return None
    return Marks(vocabulary[BEGIN] if thoughts == "maybe" else None, vocabulary[END])
