"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from parlay.serve.protocol.body import Body, Content, Count, GenerationBody, JsonObject, conflict, tool_choice_shape
from parlay.serve.protocol.json_values import WHOLE, in_words
from parlay.serve.protocol.outlining import Outline
from parlay.serve.protocol.resuming import Resume
from parlay.serve.protocol.steps_ahead import ReasonAhead, check_reason_ahead
from parlay.serve.protocol.voting import Vote, check_vote

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$"), in_words("must have 1 to 64 letters, digits, _ or -")]


class FunctionCall(Body):
    name: Name
    arguments: str


class ToolCall(Body):
    """A tool call in an earlier answer."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class SystemMessage(Body):
    """``developer`` is the newer name of ``system``; both mean the same here."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Body):
    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(Body):
    """An earlier answer; fields of a reply may come back as they were, null or empty."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"audio": ()}

    role: Literal["assistant"]
    content: Content | None = None
    refusal: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None
    function_call: FunctionCall | None = None

    @property
    def says_something(self) -> bool:
        return any(part is not None for part in (self.content, self.refusal, self.function_call)) or bool(
            self.tool_calls
        )


class ToolMessage(Body):
    """A tool's result."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


class FunctionMessage(Body):
    """A function's result, in the API's older form without tools."""

    role: Literal["function"]
    content: Content
    name: Name


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage, Field(discriminator="role")
]


class FunctionDefinition(Body):
    """``strict`` has no effect: enforced calls always match the schema."""

    name: Name
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    name: Name


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """A subset of the tools, which the answer may (``auto``) or must call."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=128, fail_fast=True)]


class AllowedToolsChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    """``schema`` is llama.cpp's addition."""

    type: Literal["json_object"]
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None


class JsonSchema(Body):
    """``strict`` has no effect: the answer always matches the schema."""

    name: Name
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[AllowedToolsChoice, Tag("allowed")],
    Discriminator(tool_choice_shape),
]
FunctionChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag("word")] | Annotated[FunctionName, Tag("named")],
    Discriminator(tool_choice_shape),
]


class ChatBody(GenerationBody):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **GenerationBody.unsupported,
        "add_special_tokens": (False,),
        "audio": (),
        "chat_template": (),
        "echo": (False,),
        "modalities": (["text"],),
        "web_search_options": (),
    }

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionDefinition], Field(max_length=128, fail_fast=True)] | None = None
    function_call: FunctionChoice | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    vote: Vote | None = None
    outline: Outline | None = None
    reason_ahead: ReasonAhead | None = None
    explain: bool | None = None
    resume: Resume | None = None

    def check(self) -> None:
        super().check()
        check_vote(self.vote, self.n)
        check_reason_ahead(self, self.reason_ahead)
        if self.outline is not None:
            self._check_outline()
        self._check_messages()
        self._check_tools()
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise conflict("max_tokens and max_completion_tokens differ: give one of them", "max_completion_tokens")
        if self.continue_final_message and self.add_generation_prompt:
            message = (
                "continue_final_message goes on with a message and add_generation_prompt begins one: give one of them"
            )
            raise conflict(message, "continue_final_message")
        if self.top_logprobs and not self.logprobs:
            raise conflict("top_logprobs works only with logprobs true: set logprobs", "top_logprobs")
        formatted = self.response_format is not None and self.response_format.type != "text"
        if self.structured_outputs is not None and (formatted or self.callable_functions):
            message = "structured_outputs can't be used with response_format or tools: remove one of them"
            raise conflict(message, "structured_outputs")

    def _check_outline(self) -> None:
        """Raises ApiError for fields that can't be combined with an outline."""
        if (self.n or 1) > 1:
            raise conflict("outline gives one choice: remove n", "n")
        if self.exactness not in (None, "lossy"):
            raise conflict("outline is lossy, so exactness must be lossy or missing", "exactness")
        if not isinstance(self.messages[-1], UserMessage):
            raise conflict("outline works only where the last message is the user's: add one", "messages")
        if self.running_usage:
            message = "outline can't be used with stream_options.continuous_usage_stats: remove one of them"
            raise conflict(message, "stream_options")
        others = ("vote", "tools", "functions", "response_format", "structured_outputs", "logprobs", "prediction")
        for name in (*others, "continue_final_message", "resume"):
            if vars(self)[name] not in (None, False, []):
                raise conflict(f"outline can't be used with {name}: remove one of them", name)

    def _check_messages(self) -> None:
        for place, message in enumerate(self.messages):
            if isinstance(message, AssistantMessage) and not message.says_something:
                raise conflict(f"messages[{place}] needs content or tool_calls", f"messages[{place}]")

    def _check_tools(self) -> None:
        legacy = bool(self.functions or self.function_call)
        if legacy and (self.tools or self.tool_choice):
            raise conflict("functions is the older form of tools: give only one of them", "functions")
        paths = ("functions[{}]", "functions") if legacy else ("tools[{}].function", "tools")
        check_functions(self._all_functions, *paths)
        field, choice = ("function_call", self.function_call) if legacy else ("tool_choice", self.tool_choice)
        names = [function.name for function in self._all_functions]
        if choice not in (None, "none") and not names:
            raise conflict(f"{field} works only with {paths[1]}: add {paths[1]}", field)
        for path, name in self._chosen or ():
            if name not in names:
                raise conflict(f"{path} is {name}, which is not among the {paths[1]}", path)

    @property
    def tokens(self) -> int | None:
        """The most tokens of the answer; None: as many as the context has room for."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def structured(self) -> bool:
        """Whether the answer may be held to a form, including tools and formats; see `GenerationBody`."""
        return (
            self.structured_outputs is not None
            or self.response_format is not None
            or bool(self.tools or self.functions)
        )

    @property
    def spelled(self) -> Mapping[str, str]:
        newer = {"max_tokens": "max_completion_tokens"} if self.max_completion_tokens is not None else {}
        return {**newer, **super().spelled}

    @property
    def legacy(self) -> bool:
        """Whether the client uses the older form of calls, without tools."""
        return self.functions is not None

    @property
    def _all_functions(self) -> list[FunctionDefinition]:
        return self.functions or [tool.function for tool in self.tools or ()]

    @property
    def _chosen(self) -> list[tuple[str, str]] | None:
        """The functions that the tool choice names, as pairs of path and name; None if it names none."""
        match self.function_call or self.tool_choice:
            case NamedTool() as named:
                return [("tool_choice.function.name", named.function.name)]
            case FunctionName() as named:
                return [("function_call.name", named.name)]
            case AllowedToolsChoice() as allowed:
                path = "tool_choice.allowed_tools.tools[{}].function.name"
                tools = enumerate(allowed.allowed_tools.tools)
                return [(path.format(place), tool.function.name) for place, tool in tools]
            case _:
                return None

    @property
    def callable_functions(self) -> dict[str, FunctionDefinition]:
        """The functions that the answer may call, by the path of their parameters in the body."""
        if "none" in (self.tool_choice, self.function_call):
            return {}
        chosen = None if self._chosen is None else {name for _, name in self._chosen}
        path = "functions[{}].parameters" if self.functions else "tools[{}].function.parameters"
        each = enumerate(self._all_functions)
        return {path.format(place): one for place, one in each if chosen is None or one.name in chosen}

    @property
    def must_call(self) -> bool:
        choice = self.function_call or self.tool_choice
        if isinstance(choice, AllowedToolsChoice):
            return choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, NamedTool | FunctionName)


def check_functions(functions: Sequence[FunctionDefinition], each: str, whole: str) -> None:
    """Check functions; ``each`` is the path of one of them, ``whole`` that of the list. Raises ApiError for a function
    that can't be called."""
    for place, function in enumerate(functions):
        if (function.parameters or {}).get("type", "object") != "object":
            field = f"{each.format(place)}.parameters"
            raise conflict(f'{field} must be a schema of "type": "object"', field)
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise conflict(f"{whole} has two functions of the same name: rename one of them", whole)
