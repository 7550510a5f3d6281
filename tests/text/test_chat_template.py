"""Chat templates write what transformers makes them write, and can do nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from parlay import LLM
from parlay.models.tokenizers.plain import PlainTokenizer
from parlay.text import template_sandbox
from parlay.text.chat_template import render, told_of_tools
from parlay.types import MachineBusy
from tests.system.late import late_answers

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = """{{ bos_token }}{% for message in messages %}
    {{- '<' + message.role + '>' + (message.content or '') + eos_token }}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}
"""
THINKING = """{%- for message in messages %}
{%- if loop.first and message.role == 'system' %}{% continue %}{% endif %}
[{{ message.role }}]{{ message.content | trim }}
{%- if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}
{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}
{%- endfor %}
{%- if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- if documents %}never{% endif %}"""
ODDITIES = """{% set ns = namespace(self=1, seen=[]) %}{% set ns.self = ns.self + 1 %}{{ ns.self }}
{{ dict(a='é<&>') | tojson }}{{ dict.fromkeys(['b'], none) }}{{ strftime_now('%Y') | length }}
{% generation %}{% set inside = 1 %}{{ messages[-1].content }}{% endgeneration %}{{ inside is defined }}
{% for message in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ message.role | tojson }}{% endfor %}
"""
DOUBLED = (
    "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(64) %}"
    "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}"
)
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('users first') }}{% endif %}{{ messages[-1].content }}"

USER = {"role": "user", "content": " Hi <there> & é "}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
THOUGHT = {"role": "assistant", "content": "So be it  ", "thinking": "hm"}
TALKS = ([USER], [SYSTEM, USER], [USER, CALL, USER], [SYSTEM, USER, THOUGHT])
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é < f", "parameters": {}}}]
VARIABLES: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False})


def ours(template: str | dict[str, str] | None) -> PlainTokenizer:
    return PlainTokenizer(Tokenizer(models.BPE()), SPECIAL, template)


def outcome(tokenizer: Any, talk: list[dict[str, Any]], wanted: Mapping[str, Any], *, theirs: bool) -> str:
    """The text, or that there is none."""
    try:
        if not theirs:
            return render(tokenizer, talk, **wanted)
        text: str = tokenizer.apply_chat_template(
            copy.deepcopy(talk),
            tools=wanted["tools"] or None,
            add_generation_prompt=wanted["begin_answer"],
            continue_final_message=wanted["continue_final"],
            tokenize=False,
            **wanted["variables"],
        )
        return text
    except Exception:
        return "refused"


@pytest.mark.parametrize(
    "template",
    [CHATML, THINKING, ODDITIES, STRICT, {"default": CHATML, "tool_use": THINKING}, {"tool_use": THINKING}],
    ids=["chatml", "thinking", "oddities", "strict", "several", "no default"],
)
def test_every_path_writes_what_transformers_writes(template: str | dict[str, str]) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template, **SPECIAL)
    found = []
    for talk, tools, variables, (begin, go_on) in product(
        TALKS, ((), TOOLS), VARIABLES, ((True, False), (False, False), (False, True))
    ):
        wanted = {"tools": tools, "variables": variables, "begin_answer": begin, "continue_final": go_on}
        found.append(outcome(ours(template), talk, wanted, theirs=False))
        assert found[-1] == outcome(theirs, talk, wanted, theirs=True), (talk, wanted)
    assert set(found) != {"refused"}


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=["left out", "none", "empty"])
def test_a_template_that_writes_calls_where_there_is_no_content_gets_none(content: dict[str, Any]) -> None:
    """DeepSeek R1's do; a conversation over HTTP has an empty text there."""
    template = """{%- for message in messages %}
{%- if message['role'] == 'assistant' and message['content'] is none %}{{ message['tool_calls'] | length }} calls;
{%- elif message['role'] == 'assistant' and message['content'] is not none %}{{ '[' + message['content'] + ']' }}
{%- endif %}{%- endfor %}"""
    talk = [USER, {**CALL, **content} if content else {"role": "assistant", "tool_calls": CALL["tool_calls"]}]
    assert render(ours(template), [*talk, {"role": "assistant", "content": ""}]) == "1 calls;[]"


@pytest.mark.parametrize("given", [{"city": "São"}, '{"city": "São"}'], ids=["object", "text"])
def test_arguments_of_calls_come_as_the_template_reads_them(given: object) -> None:
    """Over HTTP clients send a text. DeepSeek's templates join it to other texts, most others write an object."""
    talk = [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": given}}]}]
    joins = "{{ messages[1].tool_calls[0]['function']['arguments'] + ';' }}"
    writes = "{{ messages[1].tool_calls[0].function | tojson }}"
    assert render(ours(joins), talk) == '{"city": "São"};'
    assert render(ours(writes), talk) == '{"name": "f", "arguments": {"city": "São"}}'
    broken = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}, 3]}
    assert render(ours("{{ messages[0].tool_calls | tojson }}"), [broken]) == '[{"name": "f", "arguments": "{"}, 3]'


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append.__globals__ }}",
        "{{ raise_exception.__globals__['jinja2'] }}",
        "{{ strftime_now.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ ('%s' | attr('format')).__self__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__init__=1) }}",
        "{{ dict.mro() }}{{ dict.__bases__[0] }}",
        "{{ self._TemplateReference__context.environment.from_string('x') }}",
    ],
)
def test_a_template_can_t_leave_its_sandbox(attack: str) -> None:
    """It fails, or writes nothing of what it asks for."""
    with suppress(TemplateError):
        assert render(ours(attack), [USER]) == ""


@pytest.mark.parametrize(
    "attack",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) | list %}{% for a in r %}{% for b in r %}x{% endfor %}{% endfor %}",
        "{% for a in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
        "{% macro again(n) %}{{ again(n + 1) }}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
        "{% set n = namespace(t='x') %}{% for a in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
        "{% set n = namespace(t='x') %}{% for a in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t }}",
        "{% set n = namespace(t=[1]) %}{% for a in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}",
        "{{ 'x' * 99999999999 }}",
        "{{ 99999999999 * 'x' }}",
        "{{ 9 ** 99999999 }}",
        "{% set t = 'x' * 99999 %}{% for a in range(9999) %}{{ t }}{% endfor %}",
        "{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}",
        "{% set t = 'x' * 99999 %}{{ t.replace('x', t) }}",
        "{% set t = 'x' * 99999 %}{{ t | replace('x', t) }}",
        "{% set t = 'x' * 99999 %}{{ t.join(t) }}",
        "{% set t = 'x' * 99999 %}{{ t | join(t) }}",
        "{% set t = 'x' * 99999 %}{{ t.translate({120: t}) }}",
        "{% set t = 'x' * 99999 %}{{ ('{0}' * 99999).format(t) }}",
        "{% set t = 'x' * 99999 %}{{ ('%s' * 99999) % ((t,) * 99999) }}",
        "{{ 'x' | center(9999999999) }}",
        "{{ 'x'.ljust(9999999999) }}",
        "{{ [[[1]]] | tojson(indent=9999999999) }}",
        *(
            DOUBLED + each
            for each in ("{{ n.a == n.b }}", "{{ n.a in [n.b] }}", "{{ n.a | string }}", "{{ n.a ~ '' }}")
        ),
        DOUBLED + "{{ n.a | tojson }}",
        "{% set n = namespace(t=99) %}{% for a in range(40) %}{% set n.t = n.t * n.t %}{% endfor %}{{ n.t % 7 }}",
        "{{ lipsum(n=100000) }}",
        "{{ ('a' * 10**6) | wordwrap(1) }}",
        "{{ ('www.a.bc ' * 10**5) | urlize }}",
        "{{ '%3000000000d' % 1 }}",
        "{% set r = range(99999) | list %}{% for a in r %}{% set b = r[:] %}{% endfor %}",
    ],
)
def test_a_template_that_never_ends_is_ended(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon, and before it has filled the memory; what comes next is rendered."""
    monkeypatch.setattr(template_sandbox, "CPU_SECONDS", 0.1)
    with pytest.raises(TemplateError) as caught:
        render(ours(attack), [USER])
    monkeypatch.undo()
    assert "\n" not in str(caught.value)
    assert render(ours(STRICT), [USER]) == USER["content"]


def test_a_template_whose_process_gets_no_time_may_be_tried_again() -> None:
    with late_answers(), pytest.raises(MachineBusy, match="on a busy machine: try again"):
        render(ours(STRICT), [USER])
    assert render(ours(STRICT), [USER]) == USER["content"]


def test_known_templates_render_in_this_process_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process() -> None:
        raise AssertionError("a process was asked")

    monkeypatch.setattr(template_sandbox, "_process", no_process)
    with LLM("parlay-mini") as llm:
        assert "hi" in render(llm.get_tokenizer(), [{"role": "user", "content": "hi"}])
    with pytest.raises(AssertionError, match="asked"):
        render(ours(CHATML), [USER])


def test_a_long_conversation_is_no_attack() -> None:
    talk = [{"role": "user", "content": "word " * 200_000}, {"role": "assistant", "content": "yes"}] * 10
    assert len(render(ours(CHATML), talk)) > 10_000_000


def test_a_message_that_is_written_twice_can_be_gone_on_with() -> None:
    twice = ours("{{ messages[-1].content }}|{{ messages[-1].content }}.")
    assert render(twice, [USER], continue_final=True) == f"{USER['content']}|{USER['content']}"


def test_only_values_of_json_are_given_to_a_template() -> None:
    with pytest.raises(ValueError, match="can't be given a value of type object: give values of JSON"):
        render(ours(CHATML), [{"role": "user", "content": object()}])


def test_an_empty_conversation_and_a_missing_template_are_refused() -> None:
    with pytest.raises(ValueError, match="conversation is empty"):
        render(ours(CHATML), [])
    with pytest.raises(ValueError, match="no chat template"):
        render(ours(None), [USER])


def test_a_template_that_knows_no_tools_gets_them_in_its_system_message() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
    messages, left = told_of_tools(ours(CHATML), [SYSTEM, USER], tools)
    assert left == ()
    first, _, listed = messages[0]["content"].partition("nothing else.\n")
    assert first.startswith("Be brief.\n\nYou can call")
    assert json.loads(listed) == [{"name": "weather"}, {"name": "time"}]
    assert [message["role"] for message in told_of_tools(ours(CHATML), [USER], tools)[0]] == ["system", "user"]


def test_a_template_that_knows_tools_gets_them_as_they_are() -> None:
    assert told_of_tools(ours(THINKING), [USER], TOOLS) == ([USER], TOOLS)
    assert told_of_tools(ours(CHATML), [USER], TOOLS, THINKING) == ([USER], TOOLS)
