"""Every error that a user can cause in these parts stands on one page, `messages.txt`, to be read as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parlay import LLM, ParlayError, SamplingParams, StructuredOutputsParams
from parlay.llm.request_options import RequestOptions
from parlay.options import LoadOptions
from parlay.text.chat_template import ChatOptions
from parlay.text.end_tokens import read_end_tokens

PAGE = Path(__file__).with_name("messages.txt")
DEEP = json.loads('{"items":' * 200 + "{}" + "}" * 200)
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("parlay-mini")


def form(llm: LLM, **wanted: Any) -> None:
    llm.job("x", SamplingParams(structured_outputs=StructuredOutputsParams(**wanted)))


def chat(llm: LLM, messages: Any, **options: Any) -> None:
    llm.job(messages, None, None, ChatOptions(**options))


def refused(llm: LLM, template: str) -> None:
    chat(llm, [USER], template=template)


CAUSES: dict[str, Callable[[LLM], object]] = {
    "two forms": lambda llm: form(llm, regex="a", choice=["b"]),
    "no form": lambda llm: form(llm),
    "a form that is empty": lambda llm: form(llm, regex=""),
    "no choices": lambda llm: form(llm, choice=[]),
    "an empty choice": lambda llm: form(llm, choice=[""]),
    "a schema that is no JSON": lambda llm: form(llm, json="{"),
    "a schema that is a list": lambda llm: form(llm, json="[]"),
    "a schema with an unknown type": lambda llm: form(llm, json={"type": "text"}),
    "a schema too deep": lambda llm: form(llm, json=DEEP),
    "a regex that is none": lambda llm: form(llm, regex="("),
    "a regex too large": lambda llm: form(llm, regex="a" * 2_000_000),
    "a regex that matches nothing": lambda llm: form(llm, regex="()"),
    "a grammar that is none": lambda llm: form(llm, grammar="start: ???"),
    "too many choices": lambda llm: form(llm, choice=[str(number) for number in range(30_000)]),
    "a form with an unknown field": lambda llm: llm.job("x", SamplingParams(structured_outputs={"schema": {}})),
    "an empty prompt": lambda llm: llm.job(""),
    "a prompt of another kind": lambda llm: llm.generate([{"image": "x"}]),  # type: ignore[list-item]
    "half a character": lambda llm: llm.job("\ud800"),
    "a prompt too long": lambda llm: llm.job("x" * 10_000_000),
    "parameters for other prompts": lambda llm: llm.generate(["a", "b"], [SamplingParams()]),
    "documents that are one text": lambda llm: llm.generate("a", documents="b"),
    "a document of numbers": lambda llm: llm.job("a", None, RequestOptions(documents=[[10**9]])),
    "a document of another kind": lambda llm: llm.job("a", None, RequestOptions(documents=[{"a": 1}])),  # type: ignore[list-item]
    "predictions for other prompts": lambda llm: llm.generate(["a", "b"], prediction=["c"]),
    "an empty conversation": lambda llm: chat(llm, []),
    "a conversation that is a list of texts": lambda llm: llm.chat(["hi"]),  # type: ignore[list-item]
    "a picture in a message": lambda llm: chat(llm, [{"role": "user", "content": [{"type": "image_url"}]}]),
    "a role that is a control token": lambda llm: chat(llm, [{"role": "im_end", "content": "x"}]),
    "a value that is no JSON": lambda llm: chat(llm, [{"role": "user", "content": object()}]),
    "a variable that is set": lambda llm: chat(llm, [USER], variables={"messages": []}),
    "a message without content": lambda llm: chat(llm, [USER, {"role": "tool"}]),
    "nothing to go on with": lambda llm: chat(llm, [USER, {"role": "assistant"}], continue_final=True),
    "a template with an error": lambda llm: refused(llm, "{% if %}"),
    "a template that refuses": lambda llm: refused(llm, "{{ raise_exception('users first') }}"),
    "a template that leaves its sandbox": lambda llm: refused(llm, "{{ ''.__class__.__mro__ }}"),
    "a template with another filter": lambda llm: refused(llm, "{{ 'a' | urlize }}"),
    "a parameter misspelled": lambda llm: SamplingParams(temprature=1),  # type: ignore[call-arg]
    "a parameter out of range": lambda llm: SamplingParams(temperature=-1),
    "a parameter that is not a number": lambda llm: SamplingParams(top_p="high"),  # type: ignore[arg-type]
    "an end that is no token": lambda llm: read_end_tokens("two words", llm.tokenizer, 4096),
    "a number type": lambda llm: LoadOptions(dtype="int3"),
}


def test_all_messages_stand_on_one_page(llm: LLM) -> None:
    """Whoever changes one reads them all; `messages.txt` is to be edited together with them."""
    lines = []
    for cause, call in CAUSES.items():
        with pytest.raises((ValueError, ParlayError, TypeError)) as caught:
            call(llm)
        said = str(caught.value)
        assert "\n" not in said, cause
        lines.append(f"{cause}: {said}")
    assert lines == PAGE.read_text(encoding="utf-8").splitlines()
