"""What a request asks for, read from the ids of its prompt, as chat templates and users alike make them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from parlay.text.prompt_kind import FORM, kind_of
from parlay.types import SamplingParams, Tokenizer

_ROLES = frozenset({"system", "user", "assistant", "model", "tool", "human", "bot"})
_END = 128
"""Tokens of a text's beginning, and of its end, that are read."""


class PromptClassifier:
    """Tells the kind of requests by the last text of their prompts: what stands between special tokens."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder if tokenizer is not None else {}
        self._special = frozenset(token for token, each in added.items() if each.special)

    def of(self, prompt: Sequence[int], params: SamplingParams) -> str:
        """Of the request with this prompt; empty where there is no text."""
        if params.form is not None:
            return FORM
        if self._tokenizer is None:
            return ""
        for special, ids in groupby(reversed(prompt), self._special.__contains__):
            said = "" if special else _without_role(self._text([*ids][::-1]))
            if said:
                return kind_of(said)
        return ""

    def _text(self, ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        if len(ids) <= 2 * _END:
            return self._tokenizer.decode(ids)
        return f"{self._tokenizer.decode(ids[:_END])}\n{self._tokenizer.decode(ids[-_END:])}"


def _without_role(text: str) -> str:
    """A turn of a conversation without the line that says whose it is."""
    role, _, said = text.strip().partition("\n")
    return said.strip() if role.strip().lower() in _ROLES else text.strip()
