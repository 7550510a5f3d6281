"""Reasoning that models write before an answer: between which marks, and where it begins and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from parlay.types import Tokenizer


@dataclass(frozen=True, slots=True)
class Tags:
    """The texts around reasoning. ``label`` follows ``begin`` and is none of it; ``answer`` may stand around what
    follows."""

    begin: str
    end: str
    label: str = ""
    answer: tuple[str, str] = ("", "")


THINK = Tags("<think>", "</think>")
_KNOWN = (
    Tags("<seed:think>", "</seed:think>"),  # Seed-OSS
    Tags("[THINK]", "[/THINK]"),  # Magistral
    Tags("<|channel>", "<channel|>", "thought\n"),  # Gemma 4
    Tags("Here is my thought process:", "Here is my response:"),  # Granite 3.2
    THINK,
)
_RESPONSE = ("<response>", "</response>")
"""Around the answers of Granite 3.3 and ERNIE."""

Thoughts = Literal["none", "maybe", "begun"]
"""Whether an answer has reasoning; ``begun``: the prompt holds the mark that begins it."""

_LAST = 8
"""Tokens at the end of a prompt in which reasoning may begin or end."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The ids of both marks. ``begin`` None: the prompt holds it already."""

    begin: int | None
    end: int


def tags_of(template: str) -> Tags | None:
    """The marks that a chat template speaks of; None where its family does not reason."""
    found = next((tags for tags in _KNOWN if tags.end in template), None)
    return replace(found, answer=_RESPONSE) if found is not None and _RESPONSE[1] in template else found


def thoughts_after(prompt_end: str, tags: Tags = THINK) -> Thoughts:
    """Whether the answer to a prompt of such a family has reasoning. The end of the prompt tells."""
    if prompt_end.rstrip().endswith(tags.begin):
        return "begun"
    return "none" if tags.end in prompt_end.rpartition(tags.begin)[2] else "maybe"


def expected_thoughts(tokenizer: Tokenizer, prompt: Sequence[int]) -> Thoughts:
    """Whether the answer to a conversation, whose ids these are, has reasoning."""
    tags = tags_of(template_text(tokenizer))
    if tags is None:
        return "none"
    return thoughts_after(tokenizer.decode(list(prompt[-_LAST:]), skip_special_tokens=False), tags)


def template_text(tokenizer: Tokenizer) -> str:
    """The chat templates as one text, to see what they know of; empty where there is none."""
    templates = tokenizer.chat_template
    return "\n".join(templates.values()) if isinstance(templates, dict) else templates or ""


def marks(tokenizer: Tokenizer, thoughts: Thoughts) -> Marks | None:
    """The marks of reasoning that may come; None where none can, or where a mark is not one token."""
    vocabulary = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
    tags = tags_of(template_text(tokenizer)) or THINK
    if thoughts == "none" or tags.end not in vocabulary or (thoughts == "maybe" and tags.begin not in vocabulary):
        return None
    return Marks(vocabulary[tags.begin] if thoughts == "maybe" else None, vocabulary[tags.end])
