"""Makes a job from a chat request, and says how its answers are read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from parlay.llm.jobs import Job
from parlay.llm.request_options import RequestOptions
from parlay.serve.chat.answers import AnswerShape
from parlay.serve.chat.calls import HARMONY, PLAIN, CallFormat, format_of
from parlay.serve.chat.request import ChatMessage, ChatRequest, Function
from parlay.serve.errors import ApiError
from parlay.serve.hosted import Served
from parlay.serve.protocol.running import prepare
from parlay.serve.protocol.sampling_from_body import FieldNames, refused
from parlay.serve.settings import Settings
from parlay.structured.schemas import rewritten, within_grammar
from parlay.text.chat_template import ChatOptions, Tools, check_variables, in_format, render
from parlay.text.reasoning import THINK, tags_of, template_text
from parlay.text.tokenize import opening
from parlay.types import SamplingParams, StructuredOutputsParams


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form that an answer must have, and how calls in it are written; None: there are none.

    ``field`` is the body's field that asks for the form.
    """

    form: StructuredOutputsParams | None
    calls: CallFormat | None
    field: str = "structured_outputs"


def answer_form(chat: ChatRequest, template: str) -> AnswerForm:
    """The form that the request's functions and schema require together.

    Calls are held to their schema if a call is required, or if calls have no mark, as then any answer that begins with
    ``{`` is a call. Optional calls with marks are parsed, but not enforced.
    """
    schema, functions = chat.answer_schema, chat.functions
    if not functions:
        if schema is None:
            return AnswerForm(chat.params.form, None)
        return AnswerForm(StructuredOutputsParams(json=schema), None, chat.schema_field)
    field = functions[0].field if len(functions) == 1 else functions[0].field.partition("[")[0]
    if chat.must_call:
        return AnswerForm(StructuredOutputsParams(json=call_schema(functions, PLAIN.arguments)), PLAIN, field)
    shape = format_of(template)
    if schema is not None:
        grammar = f"start: answer | call\nanswer: {within_grammar(schema)}"
        shape, field = PLAIN, chat.schema_field
    elif shape.bare:
        grammar = "start: text | call\ntext: /([^{](.|\\n)*)?/"
    else:
        return AnswerForm(None, shape)
    call = f"call: {within_grammar(call_schema(functions, shape.arguments))}"
    return AnswerForm(StructuredOutputsParams(grammar=f"{grammar}\n{call}\n"), shape, field)


def call_schema(functions: Sequence[Function], key: str) -> dict[str, Any]:
    """The JSON schema of a call of any of ``functions``, with its arguments under ``key``."""
    return {"anyOf": [_call_of(function, place, key) for place, function in enumerate(functions)]}


def _call_of(function: Function, place: int, key: str) -> dict[str, Any]:
    own = function.parameters
    arguments = {"properties": {}, "additionalProperties": False} if own is None else own
    return {
        "type": "object",
        "properties": {
            "name": {"const": function.name},
            key: {"type": "object", **_moved(arguments, f"/anyOf/{place}/properties/{key}")},
        },
        "required": ["name", key],
        "additionalProperties": False,
    }


def _moved(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Move a schema to ``place`` within another one, and adapt its references."""

    def lead(part: dict[str, Any]) -> dict[str, Any]:
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            return {**part, "$ref": f"#{place}{reference[1:]}"}
        return part

    moved: dict[str, Any] = rewritten(dict(schema), lead)
    return moved


@dataclass(frozen=True, slots=True)
class Variables:
    """Variables of a chat template: ``values`` are set, ``unused`` are fields of the request that the template does not
    use."""

    values: dict[str, Any]
    unused: tuple[str, ...]


def template_variables(chat: ChatRequest, template: str, names: FieldNames) -> Variables:
    """Collect the template's variables. Raises ApiError for a variable that requests may not set, and for a verbosity
    that the template does not know."""
    try:
        check_variables(chat.variables)
    except ValueError as error:
        raise refused(error, names) from None
    values, unused = {}, []
    for name, value in chat.variables.items():
        if knows(template, name):
            values[name] = value
        else:
            unused.append(f"{names.others.get('chat_template_kwargs', 'chat_template_kwargs')}.{name}")
    if chat.effort is not None:
        found = _effort(chat.effort, template)
        values = found | values
        unused += [] if found else [names.others.get("reasoning_effort", "reasoning_effort")]
    if chat.verbosity is not None:
        if knows(template, "verbosity"):
            values.setdefault("verbosity", chat.verbosity)
        else:
            unused.append(_unused_verbosity(chat.verbosity, names))
    if not knows(template, "reasoning_content"):
        messages = enumerate(chat.messages)
        unused += [f"{names.prompt}[{place}].reasoning_content" for place, one in messages if one.reasoning is not None]
    return Variables(values, tuple(unused))


def _unused_verbosity(verbosity: str, names: FieldNames) -> str:
    """The field's name. Raises ApiError unless it has its default value, as ignoring it would change what the client
    expects."""
    field = names.others.get("verbosity", "verbosity")
    if verbosity != "medium":
        message = f"{field} is {verbosity!r}, and this model knows none: remove it"
        raise ApiError(400, message, field, "unsupported_field")
    return field


def _effort(effort: str, template: str) -> dict[str, Any]:
    """Map an effort to the template's own switch: a level of reasoning, or only on and off."""
    if knows(template, "reasoning_effort"):
        return {"reasoning_effort": effort}
    return {"enable_thinking": effort != "none"} if knows(template, "enable_thinking") else {}


def knows(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def conversation(chat: ChatRequest, template: str) -> tuple[list[dict[str, Any]], Tools]:
    """The messages and tools in the template's form."""
    shape = format_of(template)
    own_calls = "tool_calls" in template
    messages = [_message(message, shape, own_calls=own_calls) for message in chat.messages]
    return messages, [{"type": "function", "function": _described(function)} for function in chat.functions]


def _message(message: ChatMessage, shape: CallFormat, *, own_calls: bool) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        plain["name"] = message.name
    if message.call_id is not None:
        plain["tool_call_id"] = message.call_id
    if message.reasoning is not None:
        plain["reasoning_content"] = message.reasoning
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.calls]
    if own_calls and calls:
        ids = [call.id for call in message.calls]
        plain["tool_calls"] = [
            {"id": id, "type": "function", "function": call} for id, call in zip(ids, calls, strict=True)
        ]
    elif calls:
        plain["content"] += "\n".join(_written(call, shape) for call in calls)
    return plain


def _written(call: Mapping[str, Any], shape: CallFormat) -> str:
    text = json.dumps({"name": call["name"], shape.arguments: call["arguments"]}, ensure_ascii=False)
    if shape.style == "list":
        return f"{shape.begin}[{text}]{shape.end}"
    if shape.style == "named":
        return f"{shape.begin}{call['name']}[ARGS]{json.dumps(call['arguments'], ensure_ascii=False)}"
    if shape.style == "line":
        return f"{call['name']}\n{json.dumps(call['arguments'], ensure_ascii=False)}"
    return f"{shape.begin}\n{text}\n{shape.end}" if shape.begin else text


def _described(function: Function) -> dict[str, Any]:
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {key: value for key, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A job made from a chat request, and how to read its answers. ``unused`` are fields of the request that the
    model's chat template does not use."""

    job: Job
    answers: AnswerShape
    names: FieldNames
    options: RequestOptions
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatQuestion:
    """A chat request that can be given to any model; see `parlay.serve.cascades.Question`."""

    chat: ChatRequest
    settings: Settings
    names: FieldNames

    @property
    def params(self) -> SamplingParams:
        return self.chat.params

    @property
    def options(self) -> RequestOptions:
        return self.chat.options

    @property
    def plain(self) -> bool:
        options = self.chat.options
        return not (self.chat.functions or options.written or options.vote) and self.chat.answer_schema is None

    def but(self, params: SamplingParams, options: RequestOptions) -> Self:
        return replace(self, chat=replace(self.chat, params=params, options=options))

    def ready(self, served: Served) -> ChatJob:
        """Make the job. Raises ApiError if the model can't run it."""
        return chat_job(served, self.chat, self.settings, self.names)

    def job(self, served: Served) -> Job:
        return self.ready(served).job


def chat_job(served: Served, chat: ChatRequest, settings: Settings, names: FieldNames) -> ChatJob:
    """Make the job of a chat request. Raises ApiError if the model can't run it."""
    template = chat_template(served)
    form = answer_form(chat, template)
    names = names.with_form(form.field)
    messages, options, unused = formatted(chat, template, settings, names)
    params = replace(chat.params, structured_outputs=form.form)
    calls = HARMONY if HARMONY.mark in template and form.form is None else form.calls
    tags = tags_of(template)
    begins = [*([calls.begin, calls.tag] if calls is not None else []), *([tags.end] if tags is not None else [])]
    marks = not served.vocabulary.special_texts.isdisjoint(begins)  # otherwise texts come without the marks
    own = replace(chat.options, marks=marks)
    job = prepare(served, messages, params, own, settings=settings, names=names, chat=options)
    answers = AnswerShape(
        calls=calls,
        functions={function.name: function.parameters or {} for function in chat.functions},
        single=chat.single_call,
        certain=chat.must_call or chat.answer_schema is None,
        thoughts=job.thoughts,
        tags=tags or THINK,
    )
    return ChatJob(job, answers, names, own, unused)


def formatted(
    chat: ChatRequest, template: str, settings: Settings, names: FieldNames
) -> tuple[list[dict[str, Any]], ChatOptions, tuple[str, ...]]:
    """The messages and options for the chat template, and the request's fields that the template does not use."""
    messages, tools = conversation(chat, template)
    found = template_variables(chat, template, names)
    options = ChatOptions(
        tools=tools,
        variables=found.values,
        begin_answer=chat.begin_answer,
        continue_final=chat.continue_final,
        parse_special=settings.parse_special,
    )
    return messages, options, found.unused


def prompt_text(served: Served, chat: ChatRequest, settings: Settings, names: FieldNames) -> str:
    """The conversation as a prompt that the model reads as it reads the conversation.

    A beginning-of-text token that the tokenizer puts before each prompt is left out, as llama-server leaves it out:
    otherwise the model would read two. Raises ApiError or ParlayError if the conversation can't be rendered.
    """
    tokenizer = served.required_tokenizer
    messages, options, _ = formatted(chat, chat_template(served), settings, names)
    try:
        text = in_format(tokenizer, messages, options, render)
    except ValueError as error:
        raise refused(error, names) from None
    return text.removeprefix(tokenizer.special_tokens_map["bos_token"]) if opening(tokenizer) else text


def chat_template(served: Served) -> str:
    """The model's chat templates joined; empty if there are none."""
    tokenizer = served.tokenizer
    return template_text(tokenizer) if tokenizer is not None else ""
