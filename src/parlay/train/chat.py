"""The chat format: special tokens, the template saved with the tokenizer, and its plain-Python twin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

END_OF_TEXT = "<|endoftext|>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, SYSTEM, USER, ASSISTANT, END)
OPENERS = {"system": SYSTEM, "tool": SYSTEM, "user": USER, "assistant": ASSISTANT}

# A tool's result arrives as a system turn: the vocabulary has no token of its own for it.
CHAT_TEMPLATE = (
    "{{- '<|endoftext|>' -}}"
    "{%- for message in messages -%}"
    "{{- '<|' + ('system' if message['role'] == 'tool' else message['role']) + '|>' -}}"
    "{{- message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


class ChatTurn(NamedTuple):
    """One turn; ``role`` is system, user, assistant or tool."""

    role: str
    text: str


def render_chat(turns: Iterable[ChatTurn], *, answer_next: bool = False) -> str:
    """Text of a conversation; with ``answer_next`` it ends where the assistant begins to answer."""
    body = "".join(f"{OPENERS[role]}{text}{END}" for role, text in turns)
    return body + ASSISTANT if answer_next else body
