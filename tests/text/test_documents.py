"""Documents are texts or ids, for all prompts or for each; the text stays, and copying strategies draft from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from parlay import LLM, SamplingParams
from parlay.text.prompts import references

VOCAB = 50


class Letters:
    """A tokenizer of letters that counts its calls."""

    is_fast = False

    def __init__(self) -> None:
        self.calls = 0

    def encode(self, text: str, **_: object) -> list[int]:
        self.calls += 1
        return [ord(letter) - 97 for letter in text]


def read(documents: Any, prompts: int = 2, tokenizer: Any = None) -> list[tuple[tuple[int, ...], ...]]:
    return references(documents, prompts, tokenizer or Letters(), VOCAB)


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        (None, [(), ()]),
        ([], [(), ()]),
        (["ab", "c"], [((0, 1), (2,))] * 2),
        (["ab", [2, 3]], [((0, 1), (2, 3))] * 2),
        ([[2, 3], [4]], [((2, 3), (4,))] * 2),
        ([["ab"], ["c", "d"]], [((0, 1),), ((2,), (3,))]),
        ([["ab"], []], [((0, 1),), ()]),
        ([[], []], [(), ()]),
        ([[[1, 2]], ["c", [3]]], [((1, 2),), ((2,), (3,))]),
        (["", "a", []], [((0,),)] * 2),
    ],
)
def test_one_list_for_all_or_one_for_each(documents: Any, expected: object) -> None:
    assert read(documents) == expected


def test_equal_texts_are_tokenised_once() -> None:
    tokenizer = Letters()
    read([["ab", "c"], ["c", "ab"]], tokenizer=tokenizer)
    assert tokenizer.calls == 2
    first, second = read(["ab"])
    assert first is second


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        ("text", "brackets"),
        (b"text", "brackets"),
        (7, "brackets"),
        ([b"text"], "not bytes"),
        ([7], "not int"),
        ([None], "not NoneType"),
        ([[1, 50]], "not from 0 to 49"),
        ([[-1]], "not from 0 to"),
        ([[1.5]], "something else"),
        ([[1, "a"]], "something else"),
        (["a", ["b"]], "something else"),
        ([["a"]], "length 1 for 2 prompts"),
        ([["a"], ["b"], ["c"]], "length 3 for 2 prompts"),
        (["\ud800"], "Unicode"),
    ],
)
def test_what_is_no_document_is_refused(documents: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(documents)


def test_without_a_tokenizer_ids_still_work() -> None:
    assert references([[1, 2]], 1, None, VOCAB) == [((1, 2),)]
    with pytest.raises(ValueError, match="give a document as token ids"):
        references(["text"], 1, None, VOCAB)


# ------------------------------------------------------------------------------------------------------ on the built-in


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("parlay-mini", dtype="float32", strategy="prompt-lookup:policy=fixed") as model:
        yield model


PROMPT = "Once upon a time there was a"
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def answer(llm: LLM) -> str:
    return llm.generate(PROMPT, PARAMS, strategy="none")[0].outputs[0].text


def test_drafts_are_copied_from_documents_and_the_text_stays(llm: LLM, answer: str) -> None:
    (without,) = llm.generate(PROMPT, PARAMS)
    (found,) = llm.generate(PROMPT, PARAMS, documents=["Something else.", f"{PROMPT}{answer} And so on."])
    assert without.outputs[0].text == found.outputs[0].text == answer
    assert found.outputs[0].metrics.steps < without.outputs[0].metrics.steps
    assert found.outputs[0].metrics.steps < 8
    assert found.prompt_token_ids == without.prompt_token_ids


def test_each_prompt_drafts_from_its_own_documents(llm: LLM, answer: str) -> None:
    own = f"{PROMPT}{answer}"
    first, second = llm.generate([PROMPT, PROMPT], PARAMS, documents=[[own], []])
    assert first.outputs[0].text == second.outputs[0].text
    assert first.outputs[0].metrics.steps < second.outputs[0].metrics.steps


@pytest.mark.parametrize("documents", [["", "x", []], ["word " * 9000], [list(range(4096)) * 2]])
def test_empty_short_and_endless_documents_change_nothing(llm: LLM, answer: str, documents: Any) -> None:
    """A document may be longer than the context: it is no part of the prompt."""
    (output,) = llm.generate(PROMPT, PARAMS, documents=documents)
    assert output.outputs[0].text == answer


def test_chat_and_stream_take_them_too(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Tell me a story."}]
    (plain,) = llm.chat(messages, PARAMS, strategy="none")
    text = plain.outputs[0].text
    (chat,) = llm.chat(messages, PARAMS, documents=[text])
    stream = llm.stream(messages, PARAMS, documents=[text])
    assert "".join(event.text for event in stream) == chat.outputs[0].text == text
    assert stream.output.outputs[0].metrics.steps == chat.outputs[0].metrics.steps < 40


def test_requests_say_whether_they_may_be_learned_from(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    add = llm.engine.add
    monkeypatch.setattr(
        llm.engine, "add", lambda request, strategy: (seen.append(request.store), add(request, strategy))
    )
    for choice in ({}, {"store": True}, {"store": False}):
        llm.generate(PROMPT, SamplingParams(max_tokens=1, n=2), **choice)
    assert seen == [True] * 4 + [False] * 2


def test_a_bad_document_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ValueError, match="not from 0 to 4095"):
        llm.generate(PROMPT, PARAMS, documents=[[4096]])
    assert llm.engine.idle
