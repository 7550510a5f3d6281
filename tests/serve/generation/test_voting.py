"""Votes over HTTP: one choice, the outcome beside it, and usage of all chains."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from parlay.aio import AsyncLLM
from tests.serve.generation.conftest import Post

PROMPT = {"prompt": "The weather was", "temperature": 0.9, "max_tokens": 6, "seed": 11}
VOTE = {"n": 8, "answer": "[aeiou](?!.*[aeiou])"}


def test_a_completion_by_vote(post: Post) -> None:
    every = post("completions", **PROMPT, n=8)
    voted = post("completions", **PROMPT, vote=VOTE)
    (choice,) = voted["choices"]
    vote = choice["vote"]
    texts = [one["text"] for one in every["choices"]]
    assert choice["text"] == texts[vote["chain"]]
    assert choice["index"] == 0
    assert vote["votes"][vote["answer"]] == max(vote["votes"].values())
    assert sum(answer is not None for answer in vote["answers"]) == sum(vote["votes"].values())
    used = voted["usage"]["completion_tokens"]
    assert 0 < used <= every["usage"]["completion_tokens"]
    assert voted["usage"]["prompt_tokens"] == every["usage"]["prompt_tokens"]
    assert voted["parlay"]["exactness"] == every["parlay"]["exactness"]


def test_each_prompt_has_a_vote_of_its_own(post: Post) -> None:
    asked = {**PROMPT, "prompt": ["The weather was", "Once upon a time"], "vote": {**VOTE, "n": 4}}
    choices = post("completions", **asked)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert all(len(choice["vote"]["answers"]) == 4 for choice in choices)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_has_the_whole_text_when_the_vote_is_over(post: Post, stream: Post, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "Hello"}]} if path.startswith("chat") else {"prompt": "Hello"}
    asked = {**PROMPT, **prompt, "vote": VOTE}
    if path.startswith("chat"):
        del asked["prompt"]
    whole = post(path, **asked)
    chunks = stream(path, **asked, stream_options={"include_usage": True})
    with_text = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    (choice,) = with_text
    message = choice["delta"]["content"] if path.startswith("chat") else choice["text"]
    expected = whole["choices"][0]
    assert message == (expected["message"]["content"] if path.startswith("chat") else expected["text"])
    assert choice["vote"] == expected["vote"]
    assert choice["index"] == 0
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert {each["index"] for chunk in chunks for each in chunk["choices"]} == {0}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"vote": {"n": 1}}, "vote.n", "vote.n must be at least 2, got 1"),
        ({"vote": [3]}, "vote", "vote must be an object"),
        ({"vote": {"n": 4096}}, "vote.n", "vote.n"),
        ({"vote": {"answer": "("}}, "vote.answer", "vote.answer is not a regular expression"),
        ({"vote": {"confidence": 2}}, "vote.confidence", "vote.confidence must be"),
        ({"vote": {}, "n": 2}, "n", "remove n"),
        ({"vote": {}, "best_of": 2}, "best_of", "remove one of them"),
        ({"vote": {}, "temperature": 0}, "temperature", "temperature is 0"),
        ({"vote": {"by": "loudness"}}, "vote.by", "vote.by"),
        ({"vote": {"chains": 8}}, "vote.chains", "vote.chains is not supported by this server: remove it"),
    ],
)
def test_what_is_no_vote_is_refused(refusal: Post, fields: dict[str, Any], param: str, message: str) -> None:
    error = refusal("completions", **{**PROMPT, **fields})
    assert error["param"] == param
    assert message in error["message"]
    assert "\n" not in error["message"]


def test_a_pattern_that_never_ends_harms_nobody_else(refusal: Post, post: Post, engine: AsyncLLM) -> None:
    endless = {"n": 8, "answer": r"(.|\w|[^x]|\s)*x{9}$"}
    assert "regular expression took more than" in refusal("completions", **PROMPT, vote=endless)["message"]
    assert post("completions", **PROMPT)["choices"][0]["text"]
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)


def test_a_vote_of_nobody_says_so(post: Post, client: TestClient) -> None:
    (choice,) = post("completions", **PROMPT, vote={"n": 3, "answer": "boxed"})["choices"]
    assert choice["vote"]["answer"] is None
    assert choice["vote"]["votes"] == {}
    assert choice["text"]
