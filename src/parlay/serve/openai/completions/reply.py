"""Whole replies of `/v1/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from parlay.llm.outputs import CompletionOutput, RequestOutput
from parlay.serve.openai.chat.reply import AttributionReply, attributions_reply, finish_word
from parlay.serve.protocol.logprobs import CompletionLogprobs, CompletionTable, Speller, begins, ends_of, entries
from parlay.serve.protocol.usage import RequestMetrics, Summary, Usage, extras, usage
from parlay.serve.protocol.voting import VoteReply, vote_reply
from parlay.types import Tokenizer


class CompletionChoice(TypedDict):
    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    vote: NotRequired[VoteReply]
    attributions: NotRequired[list[AttributionReply]]


class CompletionReply(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: None
    metrics: RequestMetrics
    parlay: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionShape:
    """The values that all replies to one request share. ``echoes`` are the prompts' texts if the request wants them."""

    model: str
    tokenizer: Tokenizer | None
    n: int
    logprobs: bool
    explain: bool
    skip_special: bool
    echoes: tuple[str, ...] | None = None
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(16)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def echo(self, place: int) -> str:
        return self.echoes[place] if self.echoes is not None else ""

    def index(self, place: int, sample: int) -> int:
        """The index of a choice; choices are numbered prompt by prompt."""
        return place * self.n + sample


def completion_reply(outputs: Sequence[RequestOutput], shape: CompletionShape) -> CompletionReply:
    return {
        "id": shape.id,
        "object": "text_completion",
        "created": shape.created,
        "model": shape.model,
        "choices": [
            _choice(place, output, replace(sample, index=index), shape)
            for place, output in enumerate(outputs)
            for index, sample in enumerate(_chosen(output, shape.n))
        ],
        "usage": usage(outputs),
        "system_fingerprint": None,
        **extras(outputs, explain=shape.explain),
    }


def _chosen(output: RequestOutput, n: int) -> Sequence[CompletionOutput]:
    """The sample that a vote chose, or the ``n`` samples with the highest mean log-probability."""
    samples = output.outputs if output.vote is None else (output.chosen,)
    if len(samples) == n:
        return samples
    return sorted(samples, key=lambda one: (one.cumulative_logprob or 0.0) / max(len(one.token_ids), 1), reverse=True)[
        :n
    ]


def _choice(place: int, output: RequestOutput, sample: CompletionOutput, shape: CompletionShape) -> CompletionChoice:
    reason = finish_word(sample.finish_reason)
    assert reason in ("stop", "length")
    choice: CompletionChoice = {
        "text": shape.echo(place) + sample.text,
        "index": shape.index(place, sample.index),
        "logprobs": _logprobs(place, output, sample, shape) if shape.logprobs else None,
        "finish_reason": reason,
    }
    if output.vote is not None:
        choice["vote"] = vote_reply(output.vote)
    if sample.origins:
        choice["attributions"] = attributions_reply(sample)
    return choice


def _logprobs(
    place: int, output: RequestOutput, sample: CompletionOutput, shape: CompletionShape
) -> CompletionLogprobs:
    table, prompt = CompletionTable(Speller(shape.tokenizer)), output.prompt_token_ids
    if shape.echoes is not None:
        known = output.prompt_logprobs.entries if output.prompt_logprobs is not None else ()
        ends = ends_of(shape.tokenizer, prompt, skip_special=shape.skip_special)
        for token, entry, begin in zip(prompt, known, begins(ends, len(prompt)), strict=True):
            table.add(token, entry, begin)
    own = begins(sample.text_ends, len(sample.token_ids), len(shape.echo(place)))
    for token, logprob, begin in zip(sample.token_ids, entries(sample), own, strict=True):
        table.add(token, logprob, begin)
    return table.columns
