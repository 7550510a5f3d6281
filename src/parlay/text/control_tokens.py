"""Keeps what a conversation says from being read as control tokens, by which a user could speak as the system.

The spelling of a control token inside a message is cut after its first character, by a mark that the template carries
into its text. There the text is cut into pieces that are encoded one by one, and none of them spells that token. A
conversation without such spellings is one piece, so its ids are those that transformers gives it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from parlay.text.end_tokens import KNOWN_ENDS
from parlay.types import Tokenizer

CUT = "\U0010fffd"
"""The mark: a private character, which no tokenizer gives a meaning. It is lost from texts that hold it themselves."""

_LOOKS_LIKE_CONTROL = re.compile(r"[<\[{].+[>\]}]", re.DOTALL)
_AROUND_ROLES = ("<|{}|>", "<{}>", "[{}]", "<|{}>", "<{}|>")


def spellings(tokenizer: Tokenizer, *, assistant: bool) -> frozenset[str]:
    """Texts that may not become tokens in what a message says.

    An ``assistant`` may have written tokens that are not special, such as the marks of a call or of reasoning.
    """
    return frozenset(
        str(added.content)
        for added in tokenizer.added_tokens_decoder.values()
        if len(added.content) > 1
        and (added.special or (not assistant and _LOOKS_LIKE_CONTROL.fullmatch(added.content) is not None))
    )


def cut_messages(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with control tokens in what they say cut apart.

    Raises ValueError for a role that a template could make the end of a message of.
    """
    for message in messages:
        _check_role(message.get("role"))
    return [
        {name: cut(tokenizer, value, assistant=message.get("role") == "assistant") for name, value in message.items()}
        for message in messages
    ]


def cut(tokenizer: Tokenizer, value: Any, *, assistant: bool = False) -> Any:
    """The same value, with control tokens cut apart in each of its texts."""
    if isinstance(value, Mapping):
        return {cut(tokenizer, key): cut(tokenizer, item, assistant=assistant) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [cut(tokenizer, item, assistant=assistant) for item in value]
    if not isinstance(value, str):
        return value
    pattern = _pattern(spellings(tokenizer, assistant=assistant))
    return value if pattern is None else pattern.sub(CUT, value)


def pieces(text: str) -> list[str]:
    """The parts of a rendered text that are encoded one by one."""
    return [piece for piece in text.split(CUT) if piece]


@lru_cache(maxsize=16)
def _pattern(texts: frozenset[str]) -> re.Pattern[str] | None:
    """Finds the places after the first character of each spelling, overlapping ones too."""
    by_first: dict[str, list[str]] = {}
    for text in sorted(texts):
        by_first.setdefault(text[0], []).append(re.escape(text[1:]))
    found = [f"(?<={re.escape(first)})(?={'|'.join(rests)})" for first, rests in by_first.items()]
    return re.compile("|".join(found)) if found else None


def _check_role(role: object) -> None:
    if isinstance(role, str) and any(form.format(role) in KNOWN_ENDS for form in _AROUND_ROLES):
        raise ValueError(f"a message can't have the role {role!r}, which names a control token: use user or assistant")
