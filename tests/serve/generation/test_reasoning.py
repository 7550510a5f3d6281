"""Reasoning is read apart from the answer, wherever pieces end."""

from __future__ import annotations

import pytest

from parlay.serve.chat.answers import AnswerShape, Text, Thought, thought_length
from parlay.serve.chat.calls import FORMATS
from parlay.text.reasoning import THINK, Thoughts, tags_of, thoughts_after

CASES: list[tuple[Thoughts, str, str, str]] = [
    ("maybe", "<think>\n hm < ok \n</think>\n\nYes, sir. \n", "hm < ok", "Yes, sir. \n"),
    ("begun", "hm\n</think>Yes", "hm", "Yes"),
    ("maybe", "  plain <think> x", "", "  plain <think> x"),
    ("maybe", "<think>\n\n</think>\n\nA", "", "A"),
    ("maybe", "<thi", "", "<thi"),
    ("begun", "cut off </thi", "cut off </thi", ""),
    ("maybe", "<think>cut off  ", "cut off", ""),
    ("none", "<think>a</think>b", "", "<think>a</think>b"),
]


@pytest.mark.parametrize(("thoughts", "answer", "thought", "rest"), CASES)
def test_reasoning_and_answer_wherever_pieces_end(thoughts: Thoughts, answer: str, thought: str, rest: str) -> None:
    shape = AnswerShape(thoughts=thoughts)
    for pieces in ([answer], list(answer), [answer[:9], answer[9:]]):
        reader = shape.reader()
        deltas = [delta for piece in pieces for delta in reader.feed(piece)] + reader.finish()
        assert "".join(delta.text for delta in deltas if isinstance(delta, Thought)) == thought
        assert "".join(delta.text for delta in deltas if isinstance(delta, Text)) == rest


FAMILIES = [
    ("<seed:think></seed:think>", "<seed:think>hm</seed:think>\nYes", "hm", "Yes"),
    ("[THINK][/THINK]", "[THINK]hm[/THINK]Yes", "hm", "Yes"),
    ("<|channel><channel|>", "<|channel>thought\nhm\n<channel|>Yes", "hm", "Yes"),
    ("<|channel><channel|>", "<|channel>so\n<channel|>Yes", "so", "Yes"),
    (
        "Here is my thought process: Here is my response:",
        "Here is my thought process: hm\n\nHere is my response: Yes",
        "hm",
        "Yes",
    ),
    (
        "<think></think><response></response>",
        "<think>hm</think>\n<response>\nYes, a </b>.\n</response>\n",
        "hm",
        "Yes, a </b>.",
    ),
    ("<think></think><response></response>", "<think>hm</think> Yes <resp", "hm", "Yes <resp"),
    ("<think></think><response></response>", "<think>hm</think><response>Yes </resp", "hm", "Yes </resp"),
]


@pytest.mark.parametrize(("template", "answer", "thought", "rest"), FAMILIES)
def test_each_family_has_marks_of_its_own(template: str, answer: str, thought: str, rest: str) -> None:
    tags = tags_of(template)
    assert tags is not None
    shape = AnswerShape(thoughts="maybe", tags=tags)
    for pieces in ([answer], list(answer), [answer[:20], answer[20:]]):
        reader = shape.reader()
        deltas = [delta for piece in pieces for delta in reader.feed(piece)] + reader.finish()
        assert "".join(delta.text for delta in deltas if isinstance(delta, Thought)) == thought
        assert "".join(delta.text for delta in deltas if isinstance(delta, Text)) == rest


def test_calls_are_read_after_the_reasoning_and_not_in_it() -> None:
    hermes = next(known for known in FORMATS if known.mark == "<tool_call>")
    shape = AnswerShape(thoughts="begun", calls=hermes, functions={"time": {}})
    call = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    deltas = shape.read(f"I might say {call}</think>\n{call}")
    assert deltas[0] == Thought(f"I might say {call}")
    assert len([delta for delta in deltas if not isinstance(delta, Thought)]) == 2


def test_templates_and_prompts_tell() -> None:
    assert tags_of("{{ '<think>' }}{{ content.split('</think>')[-1] }}") == THINK
    assert tags_of("{{ content }}") is None
    assert thoughts_after("<|assistant|><think>\n") == "begun"
    assert thoughts_after("<|assistant|><think>\n\n</think>\n\n") == "none"
    assert thoughts_after("<|assistant|>\n") == "maybe"


def test_how_much_of_an_answer_is_reasoning() -> None:
    assert thought_length("<think>a</think>b", "maybe") == len("<think>a</think>")
    assert thought_length("a</think>b", "begun") == len("a</think>")
    assert thought_length("b", "maybe") == thought_length("<think>b", "none") == 0
