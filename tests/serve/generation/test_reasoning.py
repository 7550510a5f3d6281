"""Reasoning is read apart from the answer, wherever pieces end."""

from __future__ import annotations

import pytest

from parlay.serve.chat.answers import AnswerShape, Text, Thought, thought_length
from parlay.serve.chat.calls import FORMATS
from parlay.text.reasoning import Thoughts, reasons, thoughts_after

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


def test_calls_are_read_after_the_reasoning_and_not_in_it() -> None:
    shape = AnswerShape(thoughts="begun", calls=FORMATS[1], functions={"time": {}})
    call = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    deltas = shape.read(f"I might say {call}</think>\n{call}")
    assert deltas[0] == Thought(f"I might say {call}")
    assert len([delta for delta in deltas if not isinstance(delta, Thought)]) == 2


def test_templates_and_prompts_tell() -> None:
    assert reasons("{{ '<think>' }}{{ content.split('</think>')[-1] }}")
    assert not reasons("{{ content }}")
    assert thoughts_after("<|assistant|><think>\n") == "begun"
    assert thoughts_after("<|assistant|><think>\n\n</think>\n\n") == "none"
    assert thoughts_after("<|assistant|>\n") == "maybe"


def test_how_much_of_an_answer_is_reasoning() -> None:
    assert thought_length("<think>a</think>b", "maybe") == len("<think>a</think>")
    assert thought_length("a</think>b", "begun") == len("a</think>")
    assert thought_length("b", "maybe") == thought_length("<think>b", "none") == 0
