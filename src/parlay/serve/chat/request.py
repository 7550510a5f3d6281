"""A chat request that belongs to no protocol: what every body is translated to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from parlay.llm.input_processor import RequestOptions
from parlay.types import SamplingParams

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class PastCall:
    """A call that the assistant made earlier, its arguments read."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """``call_id`` names the call that a message of role ``tool`` answers. ``calls`` are the assistant's."""

    role: Role
    content: str
    name: str | None = None
    reasoning: str | None = None
    calls: tuple[PastCall, ...] = ()
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the answer may call. ``parameters`` is a schema of an object; None: it takes none.

    ``field`` is where the schema stands in the body.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    field: str = "tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """``functions`` are those that may be called now: none where the protocol's choice is none, one where it names one.

    ``must_call``: the answer is a call. ``single_call``: at most one. ``answer_schema`` is a JSON schema that an answer
    which is no call keeps to; it stands in ``schema_field`` of the body. ``params.structured_outputs`` can't be given
    together with functions or a schema. ``variables`` are for the model's chat template, and so are ``effort`` and
    ``verbosity``, where it knows of them; for the rest see `ChatOptions`.
    """

    messages: tuple[ChatMessage, ...]
    params: SamplingParams
    options: RequestOptions
    functions: tuple[Function, ...] = ()
    must_call: bool = False
    single_call: bool = False
    answer_schema: Mapping[str, Any] | None = None
    schema_field: str = "response_format"
    variables: Mapping[str, Any] = field(default_factory=dict)
    effort: str | None = None
    verbosity: str | None = None
    begin_answer: bool = True
    continue_final: bool = False

    @property
    def constrained(self) -> bool:
        """Whether the answer may be held to a form, which has to be compiled."""
        return bool(self.params.structured_outputs or self.functions or self.answer_schema is not None)


def one_system(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Join the system messages that stand first, because many templates take one only."""
    count = next((place for place, message in enumerate(messages) if message.role != "system"), len(messages))
    if count < 2:
        return tuple(messages)
    text = "\n\n".join(message.content for message in messages[:count])
    return (ChatMessage(role="system", content=text), *messages[count:])
