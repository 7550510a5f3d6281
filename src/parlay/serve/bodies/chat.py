"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from parlay.serve.bodies.common import Body, Content, Count, GenerationBody, JsonObject, conflict
from parlay.serve.fields import WHOLE

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionCall(Body):
    name: Name
    arguments: str


class ToolCall(Body):
    """A call that the assistant made, as an earlier reply gave it."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class SystemMessage(Body):
    """``developer`` is the newer word for ``system``; both are the same here."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Body):
    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(Body):
    """An earlier answer. What a reply carries beside its text may come back as it was: null or empty."""

    unsupported: ClassVar[frozenset[str]] = frozenset({"audio", "function_call", "refusal"})

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    annotations: Annotated[list[JsonObject], Field(max_length=0)] | None = None


class ToolMessage(Body):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Body):
    """``strict`` has no effect: arguments always keep to the schema where a call is enforced."""

    name: Name
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: Name


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchema(Body):
    """``strict`` has no effect: the answer always keeps to the schema."""

    name: Name
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def _choice_shape(value: Any) -> str:
    return "word" if isinstance(value, str) else "named"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")] | Annotated[NamedTool, Tag("named")],
    Discriminator(_choice_shape),
]


class ChatBody(GenerationBody):
    unsupported: ClassVar[frozenset[str]] = frozenset(
        {
            "audio",
            "function_call",
            "functions",
            "modalities",
            "moderation",
            "prompt_cache_key",
            "prompt_cache_retention",
            "reasoning_effort",
            "safety_identifier",
            "service_tier",
            "verbosity",
            "web_search_options",
        }
    )

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None

    def check(self) -> None:
        super().check()
        self._check_messages()
        self._check_tools()
        asked = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(asked) > 1:
            raise conflict("max_tokens and max_completion_tokens differ: give one of them", "max_completion_tokens")
        if self.top_logprobs and not self.logprobs:
            raise conflict("top_logprobs needs logprobs to be true", "top_logprobs")
        formatted = self.response_format is not None and self.response_format.type != "text"
        if self.structured_outputs is not None and (formatted or self.callable_tools):
            message = "structured_outputs can't be used with response_format or tools: leave one of them out"
            raise conflict(message, "structured_outputs")

    def _check_messages(self) -> None:
        for place, message in enumerate(self.messages):
            if isinstance(message, AssistantMessage) and message.content is None and not message.tool_calls:
                raise conflict(f"messages.{place} needs content or tool_calls", f"messages.{place}")

    def _check_tools(self) -> None:
        for place, tool in enumerate(self.tools or ()):
            if (tool.function.parameters or {}).get("type", "object") != "object":
                field = f"tools.{place}.function.parameters"
                raise conflict(f"{field} must be the schema of an object", field)
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise conflict("tools holds two functions of one name: rename one of them", "tools")
        if self.tool_choice not in (None, "none") and not names:
            raise conflict("tool_choice needs tools", "tool_choice")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            name = self.tool_choice.function.name
            raise conflict(f"tool_choice names {name}, which is not among the tools", "tool_choice")

    @property
    def tokens(self) -> int | None:
        """Most tokens of the answer; None: as many as the context holds."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def structured(self) -> bool:
        """See `GenerationBody`; tools and formats are held to forms too."""
        return self.structured_outputs is not None or self.response_format is not None or bool(self.tools)

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the answer may call; none under ``tool_choice`` none."""
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.tools or () if tool.function.name == self.tool_choice.function.name]
        return self.tools or []

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)
