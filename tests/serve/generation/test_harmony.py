"""Answers in Harmony are reasoning, text and calls, wherever the pieces of a stream end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from parlay.serve.chat.answers import AnswerShape, Arguments, Begin, Delta, Text, Thought
from parlay.serve.chat.calls import HARMONY

NAMES: dict[str, dict[str, object]] = {"weather": {}, "time": {}}
THINK, FINAL = "<|channel|>analysis<|message|>Let me see.<|end|>", "<|channel|>final<|message|>It is 5."
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'


def read(pieces: Sequence[str], *, single: bool = False) -> tuple[str, str, list[tuple[str, str]]]:
    """All reasoning, all text, and name and arguments of each call."""
    reader = AnswerShape(calls=HARMONY, functions=NAMES, single=single).reader()
    deltas: list[Delta] = [delta for piece in pieces for delta in reader.feed(piece)] + reader.finish()
    calls = [(each.name, each.call) for each in deltas if isinstance(each, Begin)]
    written = [
        (name, "".join(each.text for each in deltas if isinstance(each, Arguments) and each.call == call))
        for name, call in calls
    ]
    thought = "".join(each.text for each in deltas if isinstance(each, Thought))
    return thought, "".join(each.text for each in deltas if isinstance(each, Text)), written


@pytest.mark.parametrize(
    ("answer", "thought", "text", "calls"),
    [
        (FINAL, "", "It is 5.", []),
        (f"{THINK}<|start|>assistant{FINAL}<|return|>", "Let me see.", "It is 5.", []),
        (f"{THINK}<|start|>assistant{CALL}", "Let me see.", "", [("weather", '{"city": "Oslo"}')]),
        (
            f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}",
            "",
            "I look.",
            [("weather", '{"city": "Oslo"}')],
        ),
        (
            f"{THINK}<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{{}}",
            "Let me see.",
            "",
            [("time", "{}")],
        ),
        ("<|channel|>commentary to=functions.other<|message|>{}", "", "{}", []),
        ("<|channel|>analysis<|message|>cut o", "cut o", "", []),
        (f"{THINK}<|start|>assistant<|chan", "Let me see.", "", []),
        ("<|channel|>ana", "", "", []),
        ("<|message|>Hello<|end|>", "", "Hello", []),
        ("Plain <|end|> text.", "", "Plain <|end|> text.", []),
        ("assistant to=me", "", "assistant to=me", []),
        ("", "", "", []),
    ],
)
def test_messages_are_read_by_channel(answer: str, thought: str, text: str, calls: list[tuple[str, str]]) -> None:
    assert read([answer]) == (thought, text, calls)
    assert read(list(answer)) == (thought, text, calls)
    for cut in range(1, len(answer)):
        assert read([answer[:cut], answer[cut:]]) == (thought, text, calls)


def test_a_second_call_is_text_where_one_is_wanted() -> None:
    assert read([f"{CALL}<|start|>assistant{CALL}"], single=True)[2] == [("weather", '{"city": "Oslo"}')]
