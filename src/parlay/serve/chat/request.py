"""`ChatRequest`, to which the bodies of all protocols are translated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from parlay.llm.request_options import RequestOptions
from parlay.types import SamplingParams

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class PastCall:
    """A call in an earlier answer, with parsed arguments."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """A message; ``call_id`` names the call that a message of role ``tool`` answers. ``calls`` are those of the
    assistant."""

    role: Role
    content: str
    name: str | None = None
    reasoning: str | None = None
    calls: tuple[PastCall, ...] = ()
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the answer may call. ``parameters`` is the JSON schema of its arguments; None: it takes none.

    ``field`` is the path of the schema in the body.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    field: str = "tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """``functions`` are those that may be called: none if the tool choice is none, one if it names one.

    ``must_call``: the answer must be a call. ``single_call``: at most one call is allowed. ``answer_schema`` is the
    JSON schema of an answer that is not a call; its path in the body is ``schema_field``. ``params.structured_outputs``
    can't be combined with functions or a schema. ``variables``, ``effort`` and ``verbosity`` go to the model's chat
    template, if it uses them; for the other fields see `ChatOptions`.
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
        """Whether the answer may be held to a form, which must be compiled."""
        return bool(self.params.structured_outputs or self.functions or self.answer_schema is not None)


def one_system(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Join the leading system messages into one, as many templates accept only one."""
    count = next((place for place, message in enumerate(messages) if message.role != "system"), len(messages))
    if count < 2:
        return tuple(messages)
    text = "\n\n".join(message.content for message in messages[:count])
    return (ChatMessage(role="system", content=text), *messages[count:])
