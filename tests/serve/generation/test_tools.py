"""Tools: how they are told to models, which form answers are held to, and calls read out of answers piece by piece."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from parlay import RequestOutput, SamplingParams
from parlay.aio import AsyncLLM
from parlay.llm.request_options import RequestOptions
from parlay.serve.chat.answers import AnswerShape
from parlay.serve.chat.calls import FORMATS, PLAIN, Arguments, Begin, CallFormat, Delta, Text
from parlay.serve.chat.job import answer_form, call_schema, conversation
from parlay.serve.chat.json_calls import call_reader
from parlay.serve.chat.request import ChatRequest
from parlay.serve.errors import ApiError
from parlay.serve.openai.chat.body import ChatBody
from parlay.serve.openai.chat.contents import read_functions, read_messages, read_schema
from parlay.serve.openai.chat.reply import ChatShape, chat_reply
from parlay.serve.openai.chunks import ChatChunks
from parlay.serve.protocol.logprobs import Speller
from parlay.serve.protocol.usage import StreamUsage
from parlay.text.prompts import TokensPrompt

(
    MARKED, CODER, NAMED, MISTRAL, GRANITE, LLAMA, TAGGED, SEED, GLM45, GEMMA, FUNCTION_GEMMA, OLMO, LFM, PHI, GLM,
    NEMOTRON,
) = (
    next(known for known in FORMATS if known.mark == mark)
    for mark in (
        "<tool_call>", "<function=", "[ARGS]", "[TOOL_CALLS]", "<|tool_call|>", '"parameters"', "<|python_tag|>",
        "<seed:tool_call>", "<arg_key>", "<|tool_call>", "<start_function_call>", "<function_calls>",
        "<|tool_call_start|>", "<|/tool|>", "<|observation|>", "<TOOLCALL>",
    )
)  # fmt: skip
NAMES = {"weather", "time"}
FUNCTIONS: dict[str, dict[str, Any]] = {"weather": {}, "time": {}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "like": {"$ref": "#"}},
            "required": ["city"],
            "$defs": {"city": {"type": "string"}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = '{"name": "weather", "arguments": {"city": "São {P}\\"\\\\", "days": [1, {"a": 2}]}}'
NO_TOOLS = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
WITH_TOOLS = "{% for tool in tools %}{{ tool }}{% endfor %}{{ message.tool_calls }}<tool_call>"


def body(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields})


def chat(**fields: Any) -> ChatRequest:
    asked = body(**fields)
    return ChatRequest(
        messages=read_messages(asked),
        params=SamplingParams(),
        options=RequestOptions(),
        functions=read_functions(asked),
        must_call=asked.must_call,
        answer_schema=read_schema(asked.response_format),
    )


# ------------------------------------------------------------------------------------------------------------ reading


def read(shape: CallFormat, pieces: Sequence[str], *, single: bool = False) -> list[Delta]:
    functions = {name: WEATHER["function"]["parameters"] if name == "weather" else {} for name in NAMES}
    reader = AnswerShape(calls=shape, functions=functions, single=single).reader()
    return [delta for piece in pieces for delta in reader.feed(piece)] + reader.finish()


def joined(deltas: Sequence[Delta]) -> tuple[str, list[tuple[str, str]]]:
    """All text, and name and arguments of each call."""
    calls = [(delta.name, delta.call) for delta in deltas if isinstance(delta, Begin)]
    arguments = [
        "".join(delta.text for delta in deltas if isinstance(delta, Arguments) and delta.call == call)
        for _, call in calls
    ]
    text = "".join(delta.text for delta in deltas if isinstance(delta, Text))
    return text, [(name, written) for (name, _), written in zip(calls, arguments, strict=True)]


ARGUMENTS = json.dumps(json.loads(CALL)["arguments"], ensure_ascii=False)
CASES: list[tuple[CallFormat, str, str, list[tuple[str, str]]]] = [
    (PLAIN, "Hello there.", "Hello there.", []),
    (PLAIN, CALL, "", [("weather", ARGUMENTS)]),
    (PLAIN, '{ "name" : "time" ,\n"arguments" : {} }\n', "", [("time", "{}")]),
    (PLAIN, CALL + "\n\nThat is all.", "That is all.", [("weather", ARGUMENTS)]),
    (PLAIN, '{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
    (PLAIN, '{"answer": 42}', '{"answer": 42}', []),
    (PLAIN, '{"name": "weather", "arguments": 3}', '{"name": "weather", "arguments": 3}', []),
    (PLAIN, '{"name": "wea', '{"name": "wea', []),
    (PLAIN, CALL[:40], "", [("weather", CALL[33:40])]),
    (PLAIN, "Look: " + CALL, "Look: " + CALL, []),
    (LLAMA, '{"name": "time", "parameters": {"zone": 1}}', "", [("time", '{"zone": 1}')]),
    (TAGGED, '{"name": "time", "parameters": {"zone": 1}}', "", [("time", '{"zone": 1}')]),
    (TAGGED, '<|python_tag|>{"name": "time", "parameters": {"zone": 1}}', "", [("time", '{"zone": 1}')]),
    (
        TAGGED,
        '<|python_tag|>{"name": "time", "parameters": {}}; {"name": "weather", "parameters": {"city": "a;b"}}',
        "",
        [("time", "{}"), ("weather", '{"city": "a;b"}')],
    ),
    (TAGGED, '\n<|python_tag|>weather.call(city="Oslo", days=3)', "", [("weather", '{"city": "Oslo", "days": 3}')]),
    (TAGGED, "<|python_tag|>time.call()", "", [("time", "{}")]),
    (
        TAGGED,
        '<|python_tag|>weather.call(city="a;b"); time.call(zone=1); time.ca',
        "",
        [("weather", '{"city": "a;b"}'), ("time", '{"zone": 1}')],
    ),
    (TAGGED, "<|python_tag|>time.call() and so on", " and so on", [("time", "{}")]),
    (TAGGED, "<|python_tag|>time.call() ok", " ok", [("time", "{}")]),
    (TAGGED, '<|python_tag|>other.call(query="x")', 'other.call(query="x")', []),
    (TAGGED, "<|python_tag|>import math\nmath.sqrt(2)", "import math\nmath.sqrt(2)", []),
    (TAGGED, "<|pyth is no tag", "<|pyth is no tag", []),
    (TAGGED, "Hello there.", "Hello there.", []),
    (MARKED, f"<tool_call>\n{CALL}\n</tool_call>", "", [("weather", ARGUMENTS)]),
    (
        MARKED,
        f'Let me see.<tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "time", "arguments": {{}}}}</tool_call>\n',
        "Let me see.",
        [("weather", ARGUMENTS), ("time", "{}")],
    ),
    (MARKED, "a <tool_cal b <tool_call> c", "a <tool_cal b <tool_call> c", []),
    (MARKED, f"<tool_call>{CALL}</tool_call> done", " done", [("weather", ARGUMENTS)]),
    (MARKED, CALL, "", [("weather", ARGUMENTS)]),  # the ways in which small models of the family miss their mark
    (MARKED, f"```json\n{CALL}\n```", "", [("weather", ARGUMENTS)]),
    (PLAIN, f"```json\n{CALL}\n```", "", [("weather", ARGUMENTS)]),
    (MARKED, f"Sure:\n```\n{CALL}\n```\nDone.", "Sure:\n\nDone.", [("weather", ARGUMENTS)]),
    (MARKED, f"```xml\n<tool_call>\n{CALL}\n</tool_call>\n```", "", [("weather", ARGUMENTS)]),
    (MARKED, f"<tools>{CALL}</tools>\n<function_call>{CALL}", "", [("weather", ARGUMENTS)] * 2),
    (MARKED, '```json\n{"name": "time", "parameters": {}}\n```', "", [("time", "{}")]),
    (MARKED, f"```json\n{CALL}\n```\n```json\n{CALL}\n```", "", [("weather", ARGUMENTS)] * 2),
    (MARKED, '```json\n{"name": "John", "age": 3}\n```', '```json\n{"name": "John", "age": 3}\n```', []),
    (
        MARKED,
        '```json\n{"name": "other", "arguments": {}}\n```',
        '```json\n{"name": "other", "arguments": {}}\n```',
        [],
    ),
    (MARKED, "```python\nprint({})\n```", "```python\nprint({})\n```", []),
    (MARKED, '```json\n{"name": "weather", "argu', '```json\n{"name": "weather", "argu', []),
    (MARKED, f"```json\n{CALL[:40]}", "", [("weather", CALL[33:40])]),
    (MARKED, f"{{{CALL}}}", "", [("weather", ARGUMENTS)]),
    (MARKED, f"<tool_call>\n{{{CALL}}}\n</tool_call>", "", [("weather", ARGUMENTS)]),
    (MARKED, f"<tool_call>\n{{{CALL}\n</tool_call> x", " x", [("weather", ARGUMENTS)]),
    (MARKED, f"{{{CALL}}}\n```json\n{{{CALL}}}\n```", "", [("weather", ARGUMENTS)] * 2),
    (PLAIN, f"{{{CALL}}} Done.", "Done.", [("weather", ARGUMENTS)]),
    (MARKED, "{{name}} is a field", "{{name}} is a field", []),
    (MARKED, f'<tool_call>{CALL[:-1]}, "result": "}}"}}</tool_call> x', " x", [("weather", ARGUMENTS)]),
    (MARKED, f'```json\n{{{CALL[:-1]},\n "result": {{"a": 1}}}}}}\n```', "", [("weather", ARGUMENTS)]),
    (PLAIN, f'{CALL[:-1]}, "result": "cut off', "", [("weather", ARGUMENTS)]),
    (MARKED, f"<b>{CALL}</b>", f"<b>{CALL}</b>", []),
    (MARKED, f"Look: {CALL}", f"Look: {CALL}", []),
    (MISTRAL, f"[TOOL_CALLS] [{CALL}]", "", [("weather", ARGUMENTS)]),
    (
        MISTRAL,
        f'So: [TOOL_CALLS][{CALL}, {{"name": "time", "arguments": {{}}}}]',
        "So: ",
        [("weather", ARGUMENTS), ("time", "{}")],
    ),
    (GRANITE, f"<|tool_call|>[{CALL}]", "", [("weather", ARGUMENTS)]),
    (GRANITE, f"<|tool_call|> [{CALL}, {CALL}]", "", [("weather", ARGUMENTS)] * 2),
    (GRANITE, "a <|tool_cal b", "a <|tool_cal b", []),
    (MISTRAL, f"[TOOL_CALLS][{CALL}] done", " done", [("weather", ARGUMENTS)]),
    (MISTRAL, "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    (MISTRAL, f"[TOOL_CALLS][{CALL}, 3]", ", 3]", [("weather", ARGUMENTS)]),
    (NAMED, f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", "", [("weather", ARGUMENTS)]),
    (
        NAMED,
        f"So: [TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{ARGUMENTS}[TOOL_CALLS]time[ARGS]{{}}",
        "So: ",
        [("weather", ARGUMENTS), ("time", "{}")],
    ),
    (NAMED, "[TOOL_CALLS]other[ARGS]{}", "[TOOL_CALLS]other[ARGS]{}", []),
    (NAMED, "[TOOL_CALLS] [1]", "[TOOL_CALLS] [1]", []),
    (
        CODER,
        "Let me.\n<tool_call>\n<function=weather>\n<parameter=city>\nSão\nP\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
        "Let me.\n",
        [("weather", '{"city": "São\\nP", "days": 3}'), ("time", "{}")],
    ),
    (
        CODER,
        "<tool_call><function=time><parameter=zone>+1 h</parameter>"
        "<parameter=on>true</parameter></function></tool_call> x",
        " x",
        [("time", '{"zone": "+1 h", "on": true}')],
    ),
    (CODER, "<tool_call>\n<function=other>", "<tool_call>\n<function=other>", []),
    (CODER, "a <tool_cal b <tool_call> c", "a <tool_cal b <tool_call> c", []),
    (CODER, "<tool_call>\n<function=weather>\n<parameter=city>\nSã", "", [("weather", "")]),
    (
        SEED,
        "\n<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>",
        "\n",
        [("weather", '{"city": "Oslo"}')],
    ),
    (
        GLM45,
        "I look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>[1, 2]</arg_value>\n</tool_call><tool_call>time</tool_call>",
        "I look.\n",
        [("weather", '{"city": "Oslo", "days": [1, 2]}'), ("time", "{}")],
    ),
    (GLM45, "<tool_call>other\n<arg_key>", "<tool_call>other\n<arg_key>", []),
    (GLM45, "a <tool_call> b c", "a <tool_call> b c", []),
    (
        GLM45,
        "<tool_call>time<arg_key>zone</arg_key><arg_value>1</arg_value></tool_call>",
        "",
        [("time", '{"zone": 1}')],
    ),
    (GLM45, "hello <tool_call>wea", "hello ", []),
    (CODER, "hello <tool_call>\n<func", "hello ", []),
    (GLM45, "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_val", "", [("weather", "")]),
    (
        GEMMA,
        'So: <|tool_call>call:weather{city:<|"|>S {a}, "b"<|"|>,days:[1,{a:true,<|"|>b<|"|>:null}],'
        "at:noon now}<tool_call|>"
        "<|tool_call>call:time{}<tool_call|>",
        "So: ",
        [
            ("weather", '{"city": "S {a}, \\"b\\"", "days": [1, {"a": true, "b": null}], "at": "noon now"}'),
            ("time", "{}"),
        ],
    ),
    (GEMMA, "<|tool_call>call:other{}<tool_call|>", "<|tool_call>call:other{}<tool_call|>", []),
    (GEMMA, "a <|tool_call> b", "a <|tool_call> b", []),
    (GEMMA, '<|tool_call>call:weather{city:<|"|>Os', "", [("weather", "")]),
    (GEMMA, '<|tool_call>call:weather{days:3,city:<|"|>Os', "", [("weather", '{"days": 3')]),
    (GEMMA, "<|tool_call>call:wea", "", []),
    (GEMMA, "<|tool_call>call:time{zone:[{[}<tool_call|>.", "", [("time", "")]),
    (
        FUNCTION_GEMMA,
        "<start_function_call>call:weather{city:<escape>Oslo<escape>,days:-2.5}<end_function_call> ok",
        " ok",
        [("weather", '{"city": "Oslo", "days": -2.5}')],
    ),
    (
        OLMO,
        "Yes.\n<function_calls>\nweather(city='it\\'s \"P\"', days=[1, (2, {'a': None})], on=true, x=f())\ntime()\n"
        "</function_calls>",
        "Yes.\n",
        [
            ("weather", '{"city": "it\'s \\"P\\"", "days": [1, [2, {"a": null}]], "on": true, "x": "f()"}'),
            ("time", "{}"),
        ],
    ),
    (OLMO, "<function_calls>other()</function_calls>", "<function_calls>other()</function_calls>", []),
    (OLMO, "<function_calls>time(zone='+1", "", [("time", "")]),
    (OLMO, "<function_calls>ti", "", []),
    (
        OLMO,
        "<function_calls>weather('a=b', 3, 'more')</function_calls>",
        "",
        [("weather", '{"city": "a=b", "like": 3, "2": "more"}')],
    ),
    (OLMO, "<function_calls>time() and so on", " and so on", [("time", "{}")]),
    (
        LFM,
        '<|tool_call_start|>[weather(city="Oslo"), time(zone=-1)]<|tool_call_end|>Done.',
        "Done.",
        [("weather", '{"city": "Oslo"}'), ("time", '{"zone": -1}')],
    ),
    (LFM, "<|tool_call_start|>[time()] <|tool_call_en no end", " <|tool_call_en no end", [("time", "{}")]),
    (PHI, f"<|tool_call|>[{CALL}, {CALL}]<|/tool_call|>", "", [("weather", ARGUMENTS)] * 2),
    (PHI, f"<|tool_call|>{CALL}<|/tool_call|> x", " x", [("weather", ARGUMENTS)]),
    (NEMOTRON, f"So: <TOOLCALL>[{CALL}, {CALL}]</TOOLCALL> x", "So:  x", [("weather", ARGUMENTS)] * 2),
    (NEMOTRON, "<TOOLCALL>[]</TOOLCALL>", "<TOOLCALL>[]</TOOLCALL>", []),
    (PHI, f"functools[{CALL}]", "", [("weather", ARGUMENTS)]),
    (PHI, "import functools", "import functools", []),
    (PHI, "import functools\n", "import functools\n", []),
    (PHI, "see functools [", "see functools [", []),
    (PHI, 'functools[{"name": "wea', "", []),
    (PHI, "functools[cache]", "functools[cache]", []),
    (GLM, f"\nweather\n{ARGUMENTS}", "", [("weather", ARGUMENTS)]),
    (GLM, "time is\n{money}", "time is\n{money}", []),
    (GLM, "The weather\n{}", "The weather\n{}", []),
    (GLM, "weather\n", "", []),
    (GLM, 'weather\n{"city": "Os', "", [("weather", '{"city": "Os')]),
]


@pytest.mark.parametrize(("shape", "answer", "text", "calls"), CASES)
def test_calls_are_read_wherever_pieces_end(
    shape: CallFormat, answer: str, text: str, calls: list[tuple[str, str]]
) -> None:
    assert joined(read(shape, [answer])) == (text, calls)
    assert joined(read(shape, list(answer))) == (text, calls)
    for cut in range(1, len(answer)):
        assert joined(read(shape, [answer[:cut], answer[cut:]])) == (text, calls)


def test_arguments_are_told_as_they_come() -> None:
    reader = call_reader(PLAIN, NAMES)
    assert reader.feed('{"name": "weather", "argu') == []
    assert reader.feed('ments": {"ci') == [Begin(0, "weather"), Arguments(0, '{"ci')]
    assert reader.feed('ty": "Rome"}') == [Arguments(0, 'ty": "Rome"}')]
    assert reader.feed("}") == reader.finish() == []


def test_what_follows_the_only_call_that_is_wanted_is_text() -> None:
    answer = f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    assert joined(read(MARKED, list(answer), single=True)) == (
        f"<tool_call>{CALL}</tool_call>",
        [("weather", ARGUMENTS)],
    )


def test_arguments_that_stand_one_by_one_are_told_one_by_one() -> None:
    reader = AnswerShape(calls=GEMMA, functions=FUNCTIONS).reader()
    assert reader.feed('<|tool_call>call:weather{city:<|"|>Oslo<|"|>') == [Begin(0, "weather")]
    assert reader.feed(",days:1") == [Arguments(0, '{"city": "Oslo"')]
    assert reader.feed("}<tool_call|>") == [Arguments(0, ', "days": 1'), Arguments(0, "}")]


@pytest.mark.parametrize("written", ["[" * 5000, "-" * 5000 + "1", "1e999", "9" * 5000, "'" + "a" * 70_000 + "'"])
def test_arguments_that_no_reader_could_hold_are_text(written: str) -> None:
    """However deep or long: the server goes on."""
    closed = written + "]" * written.count("[")
    for shape, answer in (
        (OLMO, f"<function_calls>time(zone={closed})</function_calls>"),
        (GEMMA, f"<|tool_call>call:time{{zone:{closed}}}<tool_call|>"),
    ):
        ((_, arguments),) = joined(read(shape, [answer]))[1]
        assert str(json.loads(arguments)["zone"]).strip("'") == closed.strip("'")


STRING_OR_NULL: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        (STRING_OR_NULL, "90210", "90210"),
        (STRING_OR_NULL, "null", None),
        ({"type": ["string", "null"]}, "true", "true"),
        ({"$ref": "#/$defs/code"}, "12", "12"),
        ({"allOf": [{"$ref": "#/$defs/code"}]}, "12", "12"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "true"}, "true", "true"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": "integer"}, "5.5", 5.5),
        ({"oneOf": [{"type": "array"}, {"type": "string"}]}, '["a"]', ["a"]),
        ({"type": [[]], "enum": 3}, "7", 7),
        (True, "7", 7),
        ({"$ref": "#/$defs/endless"}, "7", 7),
    ],
)
def test_tagged_arguments_are_numbers_only_where_their_schema_admits_them(
    schema: Any, written: str, value: object
) -> None:
    """Pydantic writes optional strings as alternatives. A value that fits neither way stays JSON."""
    endless = {"allOf": [{"$ref": "#/$defs/endless"}] * 9}
    functions = {"time": {"properties": {"zone": schema}, "$defs": {"code": {"type": "string"}, "endless": endless}}}
    for shape, answer in (
        (CODER, f"<tool_call><function=time><parameter=zone>\n{written}\n</parameter></function></tool_call>"),
        (GLM45, f"<tool_call>time<arg_key>zone</arg_key><arg_value>{written}</arg_value></tool_call>"),
    ):
        ((_, arguments),) = joined(AnswerShape(calls=shape, functions=functions).read(answer))[1]
        assert json.loads(arguments) == {"zone": value}


@pytest.mark.parametrize(
    ("shape", "head"),
    [
        (OLMO, "<function_calls>time(zone='"),
        (GEMMA, '<|tool_call>call:time{zone:<|"|>'),
        (CODER, "<tool_call><function=time><parameter=zone>"),
        (GLM45, "<tool_call>time<arg_key>zone</arg_key><arg_value>"),
    ],
    ids=["python", "keyed", "tags", "pairs"],
)
def test_a_long_argument_is_read_once_however_many_pieces_it_comes_in(shape: CallFormat, head: str) -> None:
    """Readers run where all streams are served."""
    reader = AnswerShape(calls=shape, functions=FUNCTIONS).reader()
    reader.feed(head)
    began = time.process_time()
    for _ in range(16_000):
        reader.feed("ab\\n")
    assert time.process_time() - began < 3, "reading it all again for each piece takes half a minute"


# -------------------------------------------------------------------------------------------------------------- forms


def test_a_schema_of_calls_keeps_its_references() -> None:
    schema = call_schema(chat(tools=[TIME, WEATHER]).functions, "arguments")
    assert schema["anyOf"][0]["properties"]["arguments"] == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }
    arguments = schema["anyOf"][1]["properties"]["arguments"]
    place = "#/anyOf/1/properties/arguments"
    assert arguments["properties"] == {"city": {"$ref": f"{place}/$defs/city"}, "like": {"$ref": place}}
    assert schema["anyOf"][1]["properties"]["name"] == {"const": "weather"}


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", ["weather", "time"]), ({"type": "function", "function": {"name": "time"}}, ["time"])],
)
def test_a_call_that_must_come_is_held_to_its_schema(choice: Any, names: list[str]) -> None:
    form = answer_form(chat(tools=[WEATHER, TIME], tool_choice=choice), WITH_TOOLS)
    assert form.form is not None
    assert isinstance(form.form.json, dict)
    assert [one["properties"]["name"]["const"] for one in form.form.json["anyOf"]] == names
    assert form.calls == PLAIN


def test_a_call_that_may_come_is_held_to_its_schema_where_it_has_no_mark() -> None:
    free = answer_form(chat(tools=[WEATHER]), NO_TOOLS)
    assert free.form is not None
    assert free.form.grammar is not None
    assert free.form.grammar.startswith("start: text | call\n")
    marked = answer_form(chat(tools=[WEATHER]), WITH_TOOLS)
    assert marked.form is None
    assert marked.calls == MARKED


def test_response_formats_become_schemas() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    form = answer_form(chat(response_format=wanted), NO_TOOLS).form
    assert form is not None
    assert form.json == schema
    form = answer_form(chat(response_format={"type": "json_object"}), NO_TOOLS).form
    assert form is not None
    assert form.json == {"type": "object"}
    assert answer_form(chat(response_format={"type": "text"}), NO_TOOLS).form is None
    both = answer_form(chat(response_format=wanted, tools=[TIME]), WITH_TOOLS)
    assert both.form is not None
    assert both.form.grammar is not None
    assert both.form.grammar.startswith("start: answer | call\n")
    assert both.calls == PLAIN


def test_no_tool_can_be_called_where_none_is_wanted() -> None:
    wanted = chat(tools=[WEATHER], tool_choice="none")
    assert answer_form(wanted, WITH_TOOLS).calls is None
    assert conversation(wanted, WITH_TOOLS)[1] == []


# ------------------------------------------------------------------------------------------------------- conversation

HISTORY = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "Wea"}, {"type": "text", "text": "ther?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        ],
    },
    {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
]


def test_a_template_that_knows_tools_gets_them_as_data() -> None:
    messages, tools = conversation(chat(messages=HISTORY, tools=[WEATHER]), WITH_TOOLS)
    assert messages[0] == {"role": "system", "content": "Be kind."}
    assert messages[1]["content"] == "Weather?"
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert messages[3]["role"] == "tool"
    assert [tool["function"]["name"] for tool in tools] == ["weather"]


def test_calls_are_written_in_words_for_a_template_that_knows_none() -> None:
    messages, _ = conversation(chat(messages=HISTORY, tools=[WEATHER, TIME]), NO_TOOLS)
    assert messages[2]["content"] == '{"name": "weather", "arguments": {"city": "Rome"}}'


@pytest.mark.parametrize("arguments", ["{", "3", "[]", "null"])
def test_an_earlier_call_with_broken_arguments_is_refused(arguments: str) -> None:
    broken = json.loads(json.dumps(HISTORY).replace('{\\"city\\": \\"Rome\\"}', arguments))
    with pytest.raises(ApiError) as refused:
        conversation(chat(messages=broken), NO_TOOLS)
    assert refused.value.param == "messages[2].tool_calls[0].function.arguments"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
    ({"tools": [TIME, TIME]}, "tools"),
    (
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "string"}}}]},
        "tools[0].function.parameters",
    ),
    ({"messages": [{"role": "assistant"}]}, "messages[0]"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"tools": [TIME], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
]


@pytest.mark.parametrize(("fields", "field"), REFUSED)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError) as refused:
        body(**fields).check()
    assert refused.value.param == field


# ------------------------------------------------------------------------------------------------------------ replies


def test_a_call_in_a_reply_and_in_its_chunks(engine: AsyncLLM) -> None:
    """The model is made to write a call by a bias towards its tokens alone, in the order they come."""
    llm = engine.llm
    assert llm.tokenizer is not None
    ids = [*llm.tokenizer.encode(CALL, add_special_tokens=False), *llm.runner.spec.eos_ids[:1]]

    def dictate(tokens: list[int], logits: Tensor) -> Tensor:
        forced = torch.full_like(logits, float("-inf"))
        forced[ids[len(tokens) - 1]] = 0.0
        return forced

    params = SamplingParams(max_tokens=len(ids), logits_processors=[dictate], temperature=0)
    prompt = TokensPrompt(prompt_token_ids=ids[:1])
    job = llm.job(prompt, params, RequestOptions(strategy="none"))
    shape = ChatShape(
        model="m",
        speller=Speller(None),
        logprobs=False,
        explain=False,
        answers=AnswerShape(calls=PLAIN, functions=FUNCTIONS),
    )

    async def decode() -> tuple[list[Any], RequestOutput]:
        stream, told = await engine.submit(job), ChatChunks(job, shape, StreamUsage())
        return [chunk async for event in stream for chunk in told.add(0, event)], stream.output

    chunks, output = asyncio.run(decode())
    assert output.outputs[0].text == CALL
    (choice,) = chat_reply(output, shape)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    entries = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert entries[0]["function"]["name"] == "weather"
    assert entries[0]["id"].startswith("call_")
    assert "".join(entry["function"]["arguments"] for entry in entries) == ARGUMENTS
    assert len(entries) > 5
    assert not any(delta.get("content") for delta in deltas)
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
