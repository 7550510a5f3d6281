"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from typing_extensions import TypedDict  # typing's own is not enough for pydantic before Python 3.12

from parlay.llm.outputs import CompletionOutput
from parlay.serve.protocol.token_bytes import Offsets, Speller
from parlay.types import TokenLogprobs

NEVER = -9999.0
"""Stands for the logarithm of zero, which JSON can't write."""


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
    """Those of its tokens; none where the request wants none."""
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
    """The four columns of a completion's log-probabilities, or of the part of them that a chunk carries."""

    speller: Speller
    offsets: Offsets
    columns: CompletionLogprobs = field(
        default_factory=lambda: CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    )

    def add(self, token: int, entry: TokenLogprobs | None) -> None:
        """Adds a row. The first token of a prompt has no log-probability."""
        columns = self.columns
        columns["text_offset"].append(self.offsets.push(token))
        columns["tokens"].append(self.speller.text_of(token))
        columns["token_logprobs"].append(finite(entry.logprob) if entry is not None else None)
        columns["top_logprobs"].append(self._top(entry) if entry is not None else None)

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the chosen one, by spelling. Of two with one spelling the likelier is kept."""
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(self.speller.text_of(token), finite(logprob))
        return top
