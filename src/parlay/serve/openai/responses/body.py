"""The body of `/v1/responses`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from parlay.serve.openai.chat.body import FunctionDefinition, Name, check_functions
from parlay.serve.protocol.body import (
    Body,
    Count,
    GenerationBody,
    JsonObject,
    RefusalPart,
    TextPart,
    conflict,
    only_text,
    part_type,
    shape_of,
    tool_choice_shape,
)
from parlay.serve.protocol.json_values import WHOLE
from parlay.serve.protocol.resuming import Resume
from parlay.serve.protocol.steps_ahead import ReasonAhead, check_reason_ahead

LOGPROBS = "message.output_text.logprobs"
"""Supported values of ``include``."""


class InputText(Body):
    type: Literal["input_text"]
    text: str


class OutputText(Body):
    """A part of an earlier answer, as a reply contained it."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[JsonObject], Field(fail_fast=True)] | None = None
    logprobs: Annotated[list[JsonObject], Field(fail_fast=True)] | None = None


Part = Annotated[
    Annotated[InputText, Tag("input_text")]
    | Annotated[OutputText, Tag("output_text")]
    | Annotated[TextPart, Tag("text")]
    | Annotated[RefusalPart, Tag("refusal")],
    only_text("input_text", "output_text", "refusal"),
]
Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Part], Field(fail_fast=True), Tag("parts")], Discriminator(shape_of)
]


def text_of(content: Content) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


class ItemBase(Body):
    """Fields that all items may have; ``id`` and ``status`` of earlier answers have no effect."""

    id: str | None = None
    status: str | None = None


class InputMessage(ItemBase):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(ItemBase):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str


class CallOutputItem(ItemBase):
    """A function's result."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ThoughtText(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(ItemBase):
    """The reasoning of an earlier answer; encrypted reasoning can't be read here."""

    type: Literal["reasoning"]
    summary: Annotated[list[ThoughtText], Field(fail_fast=True)] | None = None
    content: Annotated[list[ThoughtText], Field(fail_fast=True)] | None = None


def _item_type(value: Any) -> Any:
    """The type of an item; a message may omit it."""
    return part_type(value) or "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _item_type,
        custom_error_type="unsupported_part",
        custom_error_message="this server takes items of the types message, function_call, function_call_output and "
        "reasoning",
    ),
]


class FunctionTool(FunctionDefinition):
    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, data: Any) -> Any:
        """Refuse other types of tools first, as errors about their fields would mislead."""
        if isinstance(data, dict) and data.get("type") != "function":
            raise PydanticCustomError("unsupported_part", "this server takes tools of the type function only")
        return data


class NamedFunction(Body):
    type: Literal["function"]
    name: Name


class AllowedFunctions(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=128, fail_fast=True)]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedFunction, Tag("named")]
    | Annotated[AllowedFunctions, Tag("allowed")],
    Discriminator(tool_choice_shape),
]


class PlainFormat(Body):
    type: Literal["text"]


class TextFormatJsonObject(Body):
    type: Literal["json_object"]


class TextFormatJsonSchema(Body):
    """``strict`` has no effect: the answer always matches the schema."""

    type: Literal["json_schema"]
    name: Name
    description: str | None = None
    schema_: Annotated[JsonObject, Field(alias="schema")]
    strict: bool | None = None


class TextOptions(Body):
    format: Annotated[PlainFormat | TextFormatJsonObject | TextFormatJsonSchema, Field(discriminator="type")] | None = (
        None
    )
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Body):
    effort: Annotated[str, Field(min_length=1, max_length=32)] | None = None


class ResponsesBody(GenerationBody):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **GenerationBody.unsupported,
        "background": (False,),
        "conversation": (),
        "max_completion_tokens": (),
        "max_tokens": (),
        "n_predict": (),
        "num_predict": (),
        "prompt": (),
    }

    input: Annotated[
        Annotated[Annotated[str, Field(min_length=1)], Tag("text")]
        | Annotated[Annotated[list[InputItem], Field(min_length=1, max_length=4096, fail_fast=True)], Tag("parts")],
        Discriminator(shape_of),
    ]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[str], Field(max_length=32, fail_fast=True)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None
    reason_ahead: ReasonAhead | None = None
    explain: bool | None = None
    resume: Resume | None = None

    def idle(self) -> list[str]:
        included = enumerate(self.include or ())
        paths = [f"include[{place}]" for place, name in included if name != LOGPROBS]
        return [*super().idle(), *paths, *(["truncation"] if self.truncation == "auto" else [])]

    def check(self) -> None:
        super().check()
        if (self.n or 1) > 1:
            raise conflict("n can't be above 1 here: a response has one answer", "n")
        check_reason_ahead(self, self.reason_ahead)
        if self.reason_ahead is not None and (self.logprobs is not None or self.text is not None):
            field = "text" if self.text is not None else "top_logprobs"
            raise conflict(f"reason_ahead can't be used with {field}: remove one of them", field)
        check_functions(self.tools or (), "tools[{}]", "tools")
        names = [tool.name for tool in self.tools or ()]
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise conflict("tool_choice works only with tools: add tools", "tool_choice")
        for path, name in self._chosen or ():
            if name not in names:
                raise conflict(f"{path} is {name}, which is not among the tools", path)
        formatted = self.text is not None and self.text.format is not None and self.text.format.type != "text"
        if self.structured_outputs is not None and (formatted or self.callable_tools):
            message = "structured_outputs can't be used with text.format or tools: remove one of them"
            raise conflict(message, "structured_outputs")

    @property
    def structured(self) -> bool:
        """Whether the answer may be held to a form, including tools and formats; see `GenerationBody`."""
        return super().structured or bool(self.tools) or (self.text is not None and self.text.format is not None)

    @property
    def logprobs(self) -> int | None:
        """How many alternatives per token are wanted; None: no log-probabilities."""
        wanted = bool(self.top_logprobs) or LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if wanted else None

    @property
    def _chosen(self) -> list[tuple[str, str]] | None:
        """The functions that the tool choice names, as pairs of path and name; None if it names none."""
        match self.tool_choice:
            case NamedFunction() as named:
                return [("tool_choice.name", named.name)]
            case AllowedFunctions() as allowed:
                return [(f"tool_choice.tools[{place}].name", one.name) for place, one in enumerate(allowed.tools)]
            case _:
                return None

    @property
    def callable_tools(self) -> dict[str, FunctionTool]:
        """The functions that the answer may call, by the path of their parameters in the body."""
        if self.tool_choice == "none":
            return {}
        chosen = None if self._chosen is None else {name for _, name in self._chosen}
        each = enumerate(self.tools or ())
        return {f"tools[{place}].parameters": one for place, one in each if chosen is None or one.name in chosen}

    @property
    def must_call(self) -> bool:
        if isinstance(self.tool_choice, AllowedFunctions):
            return self.tool_choice.mode == "required"
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedFunction)
