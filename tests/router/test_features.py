"""What a prompt asks for is told by rules, from its text and from its ids."""

from __future__ import annotations

import pytest

from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_tokenizer
from parlay.text.prompt_kind import FORM, PromptClassifier, kind_of
from parlay.types import KINDS, SamplingParams, StructuredOutputsParams

STORY = "The harbour lay still under the moon, and nobody on the quay spoke of the ship that had not come back. " * 8
FUNCTION = "def area(width, height):\n    return width * height\n"
ASKED = {
    "extraction": (f"Summarize: {STORY}", f"{STORY}\nWho does this passage speak of?"),
    "edit": (f"Rewrite this in the past tense:\n\n{STORY}", f"Rename the function to surface.\n\n{FUNCTION}"),
    "code": ("Write a Python function that reverses a list.", FUNCTION),
    "maths": ("Ann has 5 apples and buys 7 more. How many apples has she?", "Solve for x: 3x + 4 = 19."),
    "list": ("Name five rivers of Asia.", "Make a list of what one needs for a picnic."),
    "translation": ("Translate to German: the train is late.", "How do you say this in French: good morning"),
    "dialogue": ("You are a pirate. Tell me of your ship.", "Write a dialogue between two bakers."),
    "prose": ("Why is the sky blue?", "Tell a story about a lighthouse."),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_a_text_is_told(kind: str) -> None:
    assert [kind_of(text) for text in ASKED[kind]] == [kind, kind]


@pytest.mark.parametrize("text", ["", " ", "\n", "?", "\x00" * 10, "a" * 100_000, "(" * 5000, "1 " * 5000])
def test_any_text_is_of_some_kind(text: str) -> None:
    assert kind_of(text) in KINDS


def test_of_a_conversation_the_last_turn_counts() -> None:
    tokenizer = load_tokenizer(resolve("parlay-mini"))
    kinds = PromptClassifier(tokenizer)
    end = tokenizer.eos_token_id
    turns = ["system\nYou are a helpful assistant.", "user\nName five rivers of Asia.", "\n", "assistant\n"]
    prompt = [token for turn in turns for token in (*tokenizer.encode(turn), end)]
    assert kinds.of(prompt, SamplingParams()) == "list"


def test_an_answer_that_is_held_to_a_form_is_of_a_kind_of_its_own() -> None:
    tokenizer = load_tokenizer(resolve("parlay-mini"))
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    assert PromptClassifier(tokenizer).of(tokenizer.encode("Is it late?"), params) == FORM


def test_without_a_tokenizer_there_is_no_kind() -> None:
    assert PromptClassifier(None).of((1, 2, 3), SamplingParams()) == ""
