"""How families of models write calls of functions, told from their chat templates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from parlay.text.chat_template import takes_tools


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes a call: ``begin``, a JSON object of name and ``arguments``, ``end``.

    Where ``begin`` is empty, an answer is a call from its first character on, or none at all. ``style`` says what
    differs: ``list``, a list of such objects after ``begin``; ``named``, the bare name, ``[ARGS]`` and an object of
    arguments; ``xml``, tags.
    """

    mark: str
    """What the chat templates of the family hold."""
    begin: str
    end: str
    arguments: str
    """The key under which the arguments stand."""
    style: Literal["object", "list", "named", "xml"] = "object"


PLAIN = CallFormat("", "", "", "arguments")
FORMATS = (
    CallFormat("<function=", "<tool_call>", "</tool_call>", "arguments", "xml"),  # Qwen3-Coder
    CallFormat("<tool_call>", "<tool_call>", "</tool_call>", "arguments"),  # Hermes, Qwen
    CallFormat("[ARGS]", "[TOOL_CALLS]", "", "arguments", "named"),  # Mistral, since version 11 of its tokenizer
    CallFormat("[TOOL_CALLS]", "[TOOL_CALLS]", "", "arguments", "list"),  # Mistral before
    CallFormat('"parameters"', "", "", "parameters"),  # Llama 3
)


def format_of(template: str) -> CallFormat:
    """The format that a chat template speaks of; a template without tools gets the plain one."""
    if not takes_tools(template):
        return PLAIN
    return next((known for known in FORMATS if known.mark in template), PLAIN)
