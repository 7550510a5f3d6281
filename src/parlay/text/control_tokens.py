"""Keeps the texts of a conversation from being read as control tokens, with which a user could pose as the system.

If a message spells a control token, a mark is put after the first character of the spelling. The template copies the
mark into its text. The text is then split at the marks into pieces that are encoded one by one, so no piece spells the
token. A conversation that spells no control token is one piece, so its ids are the same as in transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from parlay.text.end_tokens import KNOWN_ENDS
from parlay.types import Tokenizer

CUT = "\U0010fffd"
"""The mark: a private-use character, to which no tokenizer gives a meaning. It is removed from texts that contain
it."""

_LOOKS_LIKE_CONTROL = re.compile(r"[<\[{].+[>\]}]", re.DOTALL)
_AROUND_ROLES = ("<|{}|>", "<{}>", "[{}]", "<|{}>", "<{}|>")


def spellings(tokenizer: Tokenizer, *, assistant: bool) -> frozenset[str]:
    """Return the texts that must not become control tokens in a message.

    An ``assistant`` message may contain tokens that are not special, such as the marks of a tool call or of reasoning.
    """
    return frozenset(
        str(added.content)
        for added in tokenizer.added_tokens_decoder.values()
        if len(added.content) > 1
        and (added.special or (not assistant and _LOOKS_LIKE_CONTROL.fullmatch(added.content) is not None))
    )


def cut_messages(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mark the spellings of control tokens in the texts of messages.

    Raises ValueError for a role that a template could turn into the end of a message.
    """
    for message in messages:
        _check_role(message.get("role"))
    return [
        {name: cut(tokenizer, value, assistant=message.get("role") == "assistant") for name, value in message.items()}
        for message in messages
    ]


def cut(tokenizer: Tokenizer, value: Any, *, assistant: bool = False) -> Any:
    """Mark the spellings of control tokens in all texts of a value."""
    if isinstance(value, Mapping):
        return {cut(tokenizer, key): cut(tokenizer, item, assistant=assistant) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [cut(tokenizer, item, assistant=assistant) for item in value]
    if not isinstance(value, str):
        return value
    pattern = _pattern(spellings(tokenizer, assistant=assistant))
    return value if pattern is None else pattern.sub(CUT, value)


def pieces(text: str) -> list[str]:
    """Split a rendered text at the marks into pieces, to be encoded one by one."""
    return [piece for piece in text.split(CUT) if piece]


@lru_cache(maxsize=16)
def _pattern(texts: frozenset[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches the place after the first character of each spelling. It consumes no text, so
    overlapping spellings are all found."""
    by_first: dict[str, list[str]] = {}
    for text in sorted(texts):
        by_first.setdefault(text[0], []).append(re.escape(text[1:]))
    found = [f"(?<={re.escape(first)})(?={'|'.join(rests)})" for first, rests in by_first.items()]
    return re.compile("|".join(found)) if found else None


def _check_role(role: object) -> None:
    if isinstance(role, str) and any(form.format(role) in KNOWN_ENDS for form in _AROUND_ROLES):
        raise ValueError(f"a message can't have the role {role!r}, which names a control token: use user or assistant")
