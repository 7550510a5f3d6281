"""Tokens as text and bytes, and their log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from parlay.drafters.other_vocabularies.letters import byte_letters
from parlay.llm.outputs import CompletionOutput
from parlay.text.detokenizer import make_detokenizer
from parlay.types import Tokenizer, TokenLogprobs

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


_ALPHABET = byte_letters()


class Speller:
    """Caches the bytes and text of one tokenizer's tokens; without a ``tokenizer`` a token is its number."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._added = tokenizer.added_tokens_decoder if tokenizer is not None else {}
        self._decoders = _decoders(tokenizer)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}

    def bytes_of(self, token: int) -> bytes:
        if (known := self._bytes.get(token)) is None:
            known = self._bytes[token] = self._spelled(token)
        return known

    def text_of(self, token: int) -> str:
        """The token's text, or its bytes in hexadecimal if they are not whole characters."""
        if (known := self._texts.get(token)) is None:
            known = self._texts[token] = self._written(token)
        return known

    def _spelled(self, token: int) -> bytes:
        if token in self._added:
            return str(self._added[token]).encode()
        written = self.tokenizer.convert_ids_to_tokens(token) if self.tokenizer is not None else None
        if self.tokenizer is None or written is None:
            return b""
        if "ByteLevel" in self._decoders and all(letter in _ALPHABET for letter in written):
            return bytes(map(_ALPHABET.__getitem__, written))
        if "ByteFallback" in self._decoders:
            byte = _BYTE.fullmatch(written)
            return bytes([int(byte[1], 16)]) if byte else written.replace(_SPACE, " ").encode()
        text: str = self.tokenizer.decode([token])
        return text.encode()

    def _written(self, token: int) -> str:
        if self.tokenizer is None:
            return f"token_id:{token}"
        spelled = self.bytes_of(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _decoders(tokenizer: Tokenizer | None) -> frozenset[str]:
    """The types of decoders that a fast tokenizer applies."""
    if tokenizer is None or not tokenizer.is_fast or tokenizer.backend_tokenizer.decoder is None:
        return frozenset()
    state: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.decoder.__getstate__())
    return frozenset(one["type"] for one in state.get("decoders", [state]))


def tokens_before(sample: CompletionOutput, length: int) -> int:
    """How many tokens begin within the first ``length`` characters of the sample's text."""
    return sum(begin < length for begin in (0, *sample.text_ends[:-1]))


def begins(ends: Sequence[int], count: int, start: int = 0) -> list[int]:
    """Where each of the first ``count`` tokens begins in a text, in characters from ``start``, given where tokens end.

    A token within a character begins where the character does; without a text all begin at ``start``.
    """
    return [start + end for end in (0, *ends)[:count]] if ends else [start] * count


def ends_of(tokenizer: Tokenizer | None, ids: Sequence[int], *, skip_special: bool) -> list[int]:
    """The length of the text after each of ``ids``; empty without a tokenizer."""
    if tokenizer is None:
        return []
    detokenizer = make_detokenizer(tokenizer, skip_special)
    return list(accumulate(len(detokenizer.push(token)) for token in ids))


NEVER = -9999.0
"""Replaces the logarithm of zero, which JSON can't represent."""


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


def entries(sample: CompletionOutput) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of a sample's tokens; empty if the request wants none."""
    return sample.logprobs.entries if sample.logprobs is not None else ()


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else NEVER


def chat_logprobs(entries: Sequence[TokenLogprobs], speller: Speller) -> ChatLogprobs:
    return {"content": [_chat_entry(entry, speller) for entry in entries], "refusal": None}


def _chat_entry(entry: TokenLogprobs, speller: Speller) -> ChatLogprob:
    top = [_spelled(token, logprob, speller) for token, logprob in entry.top]
    return {**_spelled(entry.token, entry.logprob, speller), "top_logprobs": top}


def _spelled(token: int, logprob: float, speller: Speller) -> TopLogprob:
    spelled = speller.bytes_of(token)
    return {"token": speller.text_of(token), "logprob": finite(logprob), "bytes": list(spelled)}


@dataclass(slots=True)
class CompletionTable:
    """The four columns of a completion's log-probabilities, or a chunk's part of them."""

    speller: Speller
    columns: CompletionLogprobs = field(
        default_factory=lambda: CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    )

    def add(self, token: int, entry: TokenLogprobs | None, begin: int) -> None:
        """Add a row for a token that begins at ``begin`` in the text. A prompt's first token has no log-probability."""
        columns = self.columns
        columns["text_offset"].append(begin)
        columns["tokens"].append(self.speller.text_of(token))
        columns["token_logprobs"].append(finite(entry.logprob) if entry is not None else None)
        columns["top_logprobs"].append(self._top(entry) if entry is not None else None)

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the chosen one by text; of two with the same text the likelier is kept."""
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(self.speller.text_of(token), finite(logprob))
        return top
