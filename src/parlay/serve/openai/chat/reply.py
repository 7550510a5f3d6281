"""Whole replies of `/v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from parlay.llm.outputs import CompletionOutput, RequestOutput
from parlay.serve.chat.answers import AnswerShape, Arguments, Begin, Delta, Text, Thought, thought_length
from parlay.serve.protocol.logprobs import ChatLogprobs, Speller, chat_logprobs, entries, tokens_before
from parlay.serve.protocol.outlining import OutlineReply
from parlay.serve.protocol.steps_ahead import ReasonAheadReply, ahead_reply
from parlay.serve.protocol.usage import RequestMetrics, Summary, Usage, extras, usage
from parlay.serve.protocol.voting import VoteReply, vote_reply
from parlay.types import FinishReason, TokenLogprobs

Finish = Literal["stop", "length", "tool_calls", "function_call"]


class CalledFunction(TypedDict):
    name: str
    arguments: str


class Call(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[Call]]
    function_call: NotRequired[CalledFunction]


class AttributionReply(TypedDict):
    """A part of the text that comes mostly from the datastore: ``tokens`` tokens of a document, from its token
    ``position`` on. ``share`` is the datastore's share of their probability."""

    text: str
    document: str
    position: int
    tokens: int
    share: float


class ChatChoice(TypedDict):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    vote: NotRequired[VoteReply]
    outline: NotRequired[OutlineReply]
    attributions: NotRequired[list[AttributionReply]]
    reason_ahead: NotRequired[ReasonAheadReply]


class ChatReply(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None
    metrics: RequestMetrics
    parlay: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """The values that all replies to one request share."""

    model: str
    speller: Speller
    logprobs: bool
    explain: bool
    answers: AnswerShape = field(default_factory=AnswerShape)
    legacy: bool = False
    """Whether calls have the API's older form, without tools: one call at most."""
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(16)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def logprobs_of(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        return chat_logprobs(entries, self.speller) if self.logprobs else None


def chat_reply(output: RequestOutput, shape: ChatShape) -> ChatReply:
    return {
        "id": shape.id,
        "object": "chat.completion",
        "created": shape.created,
        "model": shape.model,
        "choices": _choices(output, shape),
        "usage": usage([output], sum(reasoning_tokens(sample, shape) for sample in output.outputs)),
        "system_fingerprint": None,
        **extras([output], explain=shape.explain),
    }


def _choices(output: RequestOutput, shape: ChatShape) -> list[ChatChoice]:
    if (ahead := ahead_reply(output)) is not None:
        return [{**_choice(output.chosen, shape), "reason_ahead": ahead}]
    if output.vote is None:
        return [_choice(sample, shape) for sample in output.outputs]
    choice = _choice(replace(output.chosen, index=0), shape)
    choice["vote"] = vote_reply(output.vote)
    return [choice]


def _choice(sample: CompletionOutput, shape: ChatShape) -> ChatChoice:
    deltas = shape.answers.read(sample.text)
    text = "".join(delta.text for delta in deltas if isinstance(delta, Text))
    calls = [delta for delta in deltas if isinstance(delta, Begin)]
    message: AnswerMessage = {"role": "assistant", "content": text, "refusal": None}
    thought = "".join(delta.text for delta in deltas if isinstance(delta, Thought))
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["content"] = text or None
    if calls and shape.legacy:
        message["function_call"] = _call(calls[0], deltas)["function"]
    elif calls:
        message["tool_calls"] = [_call(begin, deltas) for begin in calls]
    choice: ChatChoice = {
        "index": sample.index,
        "message": message,
        "logprobs": shape.logprobs_of(entries(sample)),
        "finish_reason": finish_word(sample.finish_reason, called=called_word(shape) if calls else None),
    }
    if sample.origins:
        choice["attributions"] = attributions_reply(sample)
    return choice


def reasoning_tokens(sample: CompletionOutput, shape: ChatShape) -> int:
    length = thought_length(sample.text, shape.answers.thoughts, shape.answers.tags)
    return tokens_before(sample, length)


def called_word(shape: ChatShape) -> Literal["tool_calls", "function_call"]:
    return "function_call" if shape.legacy else "tool_calls"


def _call(begin: Begin, deltas: Sequence[Delta]) -> Call:
    written = (delta.text for delta in deltas if isinstance(delta, Arguments) and delta.call == begin.call)
    return {"id": call_id(), "type": "function", "function": {"name": begin.name, "arguments": "".join(written)}}


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def finish_word(reason: FinishReason, *, called: Literal["tool_calls", "function_call"] | None = None) -> Finish:
    """The finish reason in OpenAI's words; ``called`` is the one for an answer with calls. An answer that was cut short
    has the reason "length" even with calls."""
    if reason == "stop":
        return called or "stop"
    return "length"


def attributions_reply(sample: CompletionOutput) -> list[AttributionReply]:
    """The parts of a text that come mostly from the datastore, as JSON."""
    return [
        {
            "text": part.text,
            "document": part.document,
            "position": part.position,
            "tokens": part.tokens,
            "share": part.share,
        }
        for part in sample.attributions
    ]
