"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from parlay.serve.protocol.body import (
    INT_LIMIT,
    OURS,
    Body,
    CacheSalt,
    Count,
    JsonObject,
    Probability,
    StopList,
    TextPart,
    conflict,
    only_text,
    shape_of,
)
from parlay.serve.protocol.json_values import WHOLE, Seed, in_words
from parlay.serve.protocol.resuming import Resume

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$"), in_words("must have 1 to 128 letters, digits, _ or -")]
Texts = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("parts")],
    Discriminator(shape_of),
]
"""A string, or a list of text blocks."""


class PlainSource(Body):
    """The text of a document."""

    type: Literal["text"]
    media_type: Literal["text/plain"] | None = None
    data: str

    @property
    def text(self) -> str:
        return self.data


class BlocksSource(Body):
    """The text of a document in blocks."""

    type: Literal["content"]
    content: Texts

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(block.text for block in self.content)


class Document(Body):
    """A document that is text; those in PDF, at an address or in a store of files can't be read here."""

    type: Literal["document"]
    source: Annotated[
        Annotated[PlainSource, Tag("text")] | Annotated[BlocksSource, Tag("content")], only_text("text", "content")
    ]
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        """Title, context and text, with an empty line after each."""
        return "".join(f"{part}\n\n" for part in (self.title, self.context, self.source.text) if part)


class ToolUse(Body):
    """A tool call in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: Name
    input: JsonObject


class ToolResult(Body):
    """A tool's result; with ``is_error`` the model is told that the tool failed."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None


class Thinking(Body):
    """The reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinking(Body):
    """Encrypted reasoning, which is left out of the prompt."""

    type: Literal["redacted_thinking"]


Block = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[Document, Tag("document")]
    | Annotated[ToolUse, Tag("tool_use")]
    | Annotated[ToolResult, Tag("tool_result")]
    | Annotated[Thinking, Tag("thinking")]
    | Annotated[RedactedThinking, Tag("redacted_thinking")],
    only_text("text", "document", "tool_use", "tool_result", "thinking"),
]


class SystemParam(Body):
    """Instructions within the conversation."""

    role: Literal["system"]
    content: Texts


class TurnParam(Body):
    """A message of the user or the assistant."""

    role: Literal["user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[Block], Field(fail_fast=True), Tag("parts")],
        Discriminator(shape_of),
    ]

    @property
    def blocks(self) -> list[TextPart | Document | ToolUse | ToolResult | Thinking | RedactedThinking]:
        return [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else list(self.content)


MessageParam = Annotated[SystemParam | TurnParam, Field(discriminator="role")]


class CustomTool(Body):
    """A function of the client; tools that Anthropic's servers run do not exist here."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: JsonObject


class ToolChoice(Body):
    """``name`` is used with the type ``tool`` only."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Body):
    """Whether the model reasons first, if its chat template has a switch for that."""

    type: Literal["enabled", "disabled", "adaptive"]


class SchemaFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaFormat | None = None


class CountBody(Body):
    """The fields that determine the tokens of a prompt. Null means the same as leaving a field out."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"container": (), "mcp_servers": ([],)}

    model: Annotated[str | None, Field(description="optional if the server has one model")] = None
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=4096, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[CustomTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None

    def check(self) -> None:
        """Check rules that the schema can't express. Raises ApiError for fields that contradict each other."""
        names = [tool.name for tool in self.tools or ()]
        for place, tool in enumerate(self.tools or ()):
            if tool.input_schema.get("type", "object") != "object":
                field = f"tools[{place}].input_schema"
                raise conflict(f'{field} must be a schema of "type": "object"', field)
        if len(set(names)) < len(names):
            raise conflict("tools has two functions of the same name: rename one of them", "tools")
        if self.tool_choice is None:
            return
        if self.tool_choice.type in ("any", "tool") and not names:
            raise conflict("tool_choice works only with tools: add tools", "tool_choice")
        if self.tool_choice.type == "tool" and self.tool_choice.name not in names:
            raise conflict(
                f"tool_choice.name is {self.tool_choice.name}, which is not among the tools", "tool_choice.name"
            )

    @property
    def callable_tools(self) -> dict[str, CustomTool]:
        """The tools that the answer may call, by the path of their schema in the body."""
        kind = self.tool_choice.type if self.tool_choice is not None else "auto"
        name = self.tool_choice.name if self.tool_choice is not None and kind == "tool" else None
        each = enumerate(self.tools or () if kind != "none" else ())
        return {f"tools[{place}].input_schema": tool for place, tool in each if name in (None, tool.name)}

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema that the answer must match; None if any answer will do."""
        own = self.output_config.format if self.output_config is not None else None
        wanted = own or self.output_format
        return wanted.schema_ if wanted is not None else None


class MessagesBody(CountBody):
    """With ``max_tokens`` 0 the prompt is only read, for requests that begin alike.

    ``seed``, ``strategy``, ``exactness``, ``store``, ``cache_salt`` and ``resume`` are extensions."""

    elsewhere: ClassVar[Mapping[str, str]] = OURS

    max_tokens: Count
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=0, le=INT_LIMIT), WHOLE] | None = None
    stop_sequences: StopList | None = None
    stream: bool | None = None
    seed: Seed | None = None
    strategy: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    exactness: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    store: bool | None = None
    cache_salt: CacheSalt | None = None
    resume: Resume | None = None
