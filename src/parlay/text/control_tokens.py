"""Keeps texts of a conversation from being read as control tokens, by which a user could speak as the system.

In messages, the spelling of a control token is cut after its first character, by a mark that the template copies into
its text. There the text is split at the marks into pieces, which are encoded one by one, so no piece spells the token.
A conversation without such spellings is one piece, so its ids are the same as in transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from parlay.text.end_tokens import KNOWN_ENDS
from parlay.types import Tokenizer

CUT = "\U0010fffd"
"""The mark: a private-use character, to which no tokenizer gives a meaning. Texts that contain it lose it."""

_LOOKS_LIKE_CONTROL = re.compile(r"[<\[{].+[>\]}]", re.DOTALL)
_AROUND_ROLES = ("<|{}|>", "<{}>", "[{}]", "<|{}>", "<{}|>")


def spellings(tokenizer: Tokenizer, *, assistant: bool) -> frozenset[str]:
    """Texts that must not become tokens in a message.

    An ``assistant`` may have written tokens that are not special, such as the marks of a call or of reasoning.
    """
    return frozenset(
        str(added.content)
        for added in tokenizer.added_tokens_decoder.values()
        if len(added.content) > 1
        and (added.special or (not assistant and _LOOKS_LIKE_CONTROL.fullmatch(added.content) is not None))
    )


def cut_messages(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with spellings of control tokens cut apart in their texts.

    Raises ValueError for a role that a template could turn into the end of a message.
    """
    for message in messages:
        _check_role(message.get("role"))
    return [
        {name: cut(tokenizer, value, assistant=message.get("role") == "assistant") for name, value in message.items()}
        for message in messages
    ]


def cut(tokenizer: Tokenizer, value: Any, *, assistant: bool = False) -> Any:
    """The value, with spellings of control tokens cut apart in all its texts."""
    if isinstance(value, Mapping):
        return {cut(tokenizer, key): cut(tokenizer, item, assistant=assistant) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [cut(tokenizer, item, assistant=assistant) for item in value]
    if not isinstance(value, str):
        return value
    pattern = _pattern(spellings(tokenizer, assistant=assistant))
    return value if pattern is None else pattern.sub(CUT, value)


def pieces(text: str) -> list[str]:
    """The pieces of a rendered text, to be encoded one by one."""
    return [piece for piece in text.split(CUT) if piece]


@lru_cache(maxsize=16)
def _pattern(texts: frozenset[str]) -> re.Pattern[str] | None:
    """Matches the places after the first character of each spelling, also where spellings overlap."""
    by_first: dict[str, list[str]] = {}
    for text in sorted(texts):
        by_first.setdefault(text[0], []).append(re.escape(text[1:]))
    found = [f"(?<={re.escape(first)})(?={'|'.join(rests)})" for first, rests in by_first.items()]
    return re.compile("|".join(found)) if found else None


def _check_role(role: object) -> None:
    if isinstance(role, str) and any(form.format(role) in KNOWN_ENDS for form in _AROUND_ROLES):
        raise ValueError(f"a message can't have the role {role!r}, which names a control token: use user or assistant")
