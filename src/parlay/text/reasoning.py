"""Finds the reasoning that models write before an answer, by the marks that begin and end it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from parlay.types import Tokenizer


@dataclass(frozen=True, slots=True)
class Tags:
    """The texts around reasoning. ``label``: a text after ``begin`` that is not part of the reasoning.

    ``answer``: texts that may surround the answer, which follows the reasoning.
    """

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
"""Texts around the answers of Granite 3.3 and ERNIE."""

Thoughts = Literal["none", "maybe", "begun"]
"""Whether an answer has reasoning; ``begun``: the prompt ends inside the reasoning."""

_LAST = 8
"""How many tokens at the end of a prompt are searched for the marks."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The token ids of both marks. ``begin`` is None if the prompt has it already."""

    begin: int | None
    end: int


def tags_of(template: str) -> Tags | None:
    """Return the marks that a chat template uses; None if the template has no marks of reasoning."""
    found = next((tags for tags in _KNOWN if tags.end in template), None)
    return replace(found, answer=_RESPONSE) if found is not None and _RESPONSE[1] in template else found


def thoughts_after(prompt_end: str, tags: Tags = THINK) -> Thoughts:
    """Tell by the end of a prompt whether its answer has reasoning."""
    if prompt_end.rstrip().endswith(tags.begin):
        return "begun"
    return "none" if tags.end in prompt_end.rpartition(tags.begin)[2] else "maybe"


def expected_thoughts(tokenizer: Tokenizer, prompt: Sequence[int]) -> Thoughts:
    """Tell whether the answer to a conversation with these ids has reasoning."""
    tags = tags_of(template_text(tokenizer))
    if tags is None:
        return "none"
    return thoughts_after(tokenizer.decode(list(prompt[-_LAST:]), skip_special_tokens=False), tags)


def template_text(tokenizer: Tokenizer) -> str:
    """Join all chat templates of a tokenizer to one text, to search in; empty if it has none."""
    templates = tokenizer.chat_template
    return "\n".join(templates.values()) if isinstance(templates, dict) else templates or ""


def marks(tokenizer: Tokenizer, thoughts: Thoughts) -> Marks | None:
    """Return the marks of reasoning that the answer may contain. None if it has no reasoning, or if a mark is not one
    token."""
    vocabulary = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
    tags = tags_of(template_text(tokenizer)) or THINK
    if thoughts == "none" or tags.end not in vocabulary or (thoughts == "maybe" and tags.begin not in vocabulary):
        return None
    return Marks(vocabulary[tags.begin] if thoughts == "maybe" else None, vocabulary[tags.end])
