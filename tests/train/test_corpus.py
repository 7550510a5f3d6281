"""What enters training, and what never does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parlay.train.corpus import read_corpus
from parlay.train.tokenizer import train_tokenizer, wrap_tokenizer


def test_benchmark_tasks_never_enter(data: Path) -> None:
    """MBPP ids 11 to 510 are a benchmark."""
    documents = [document for document in read_corpus(data)["code"] if document.key.startswith("mbpp-")]
    numbers = {int(document.key.removeprefix("mbpp-")) for document in documents}
    assert numbers == {*range(1, 11), *range(511, 600)}
    assert not any(re.search(r"\bTask (1[1-9]|[2-9]\d|[1-4]\d\d|50\d|510)\.", document.text) for document in documents)


def test_every_kind_is_split_and_the_split_is_the_same_each_time(data: Path) -> None:
    first, second = read_corpus(data), read_corpus(data)
    assert first == second
    for kind, documents in first.items():
        assert {document.heldout for document in documents} == {False, True}, kind


def test_a_sentence_is_never_on_both_sides_of_the_split(data: Path) -> None:
    """Many pairs share their English side, so that side decides."""
    sides: dict[bool, set[str]] = {False: set(), True: set()}
    for document in read_corpus(data)["translation"]:
        sides[document.heldout] |= set(re.findall(r"Sentence \d+\.", document.text))
    assert sides[True]
    assert not sides[False] & sides[True]


def test_calculator_marks_are_stripped(data: Path) -> None:
    documents = read_corpus(data)["maths"]
    assert not any("<<" in document.text or ">>" in document.text for document in documents)
    assert any("7+1 = 8\n#### 8" in document.text for document in documents)


def test_calls_are_assistant_turns_of_valid_json(data: Path) -> None:
    text = read_corpus(data)["calls"][0].text
    assert (
        '<|assistant|>{"name": "add_item", "arguments": {"name": "tea 0", "size": "medium", "cups": 0}}<|end|>' in text
    )
    assert '<|system|>{"order": 0, "state": "accepted"}<|end|>' in text


def test_a_missing_file_is_named(data: Path) -> None:
    (data / "mbpp" / "mbpp.jsonl").unlink()
    with pytest.raises(ValueError, match=r"mbpp\.jsonl"):
        read_corpus(data)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        read_corpus(tmp_path / "nowhere")


def test_the_saved_chat_template_renders_what_training_saw() -> None:
    """`render_chat` made the training text, `apply_chat_template` makes the prompts: they begin as training rows do."""
    from parlay.train.chat import END_OF_TEXT, ChatTurn, render_chat

    turns = [ChatTurn("system", "S"), ChatTurn("user", "U\n"), ChatTurn("assistant", "A"), ChatTurn("tool", "{}")]
    tokenizer = wrap_tokenizer(train_tokenizer(["a b c"], 300), 128)
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    for answer_next in (False, True):
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer_next)
        assert rendered == END_OF_TEXT + render_chat(turns, answer_next=answer_next)
