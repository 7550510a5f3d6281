"""`outline` of /v1/chat/completions: sections in order, streamed as they are decoded, and plans that are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from parlay import SamplingParams
from parlay.aio import AsyncLLM
from parlay.llm.judging import Words
from parlay.llm.outlining import read_outline, section_prompts
from parlay.serve.openai.chat import outlined
from tests.serve.generation.conftest import Post

QUESTION = "How can I sleep better?"
ASKED: dict[str, Any] = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}],
    "outline": {"route": False, "outline_tokens": 8},
    "temperature": 0,
    "max_tokens": 9,
}
POINTS = ("Dark room", "No screens", "Fixed hours")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own outline is no list, so one is put in its place."""

    def read(output: Any, params: Any) -> Any:
        text = "".join(f"{number}. {point}\n" for number, point in enumerate(POINTS, 1))
        return read_outline(replace(output, outputs=(replace(output.chosen, text=text, finish_reason="stop"),)), params)

    monkeypatch.setattr(outlined, "read_outline", read)


def sections(engine: AsyncLLM) -> list[str]:
    """What each section's prompt gives by itself."""
    params = SamplingParams(temperature=0, max_tokens=9)
    asked = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": each}]
             for each in section_prompts(QUESTION, POINTS)]  # fmt: skip
    return [output.chosen.text for output in engine.llm.chat(asked, params, strategy="none")]


@pytest.mark.usefixtures("planned")
def test_an_answer_by_outline_has_its_sections_in_order(post: Post, engine: AsyncLLM) -> None:
    reply = post("chat/completions", **ASKED)
    (choice,) = reply["choices"]
    each = zip(POINTS, sections(engine), strict=True)
    expected = "\n\n".join(f"{number}. {point}\n{text.strip()}" for number, (point, text) in enumerate(each, 1))
    assert choice["message"]["content"] == expected
    assert choice["outline"] == {"points": list(POINTS), "note": ""}
    assert choice["finish_reason"] == "length"
    assert reply["parlay"]["exactness"] == "lossy"
    assert 9 * 3 < reply["usage"]["completion_tokens"] <= 9 * 3 + 8


@pytest.mark.usefixtures("planned")
def test_a_stream_has_the_same_text_and_usage(post: Post, stream: Post) -> None:
    whole = post("chat/completions", **ASKED)
    chunks = stream("chat/completions", **ASKED, stream_options={"include_usage": True})
    first, *rest = [choice for chunk in chunks for choice in chunk["choices"]]
    assert first["outline"] == whole["choices"][0]["outline"]
    text = "".join(choice["delta"].get("content", "") for choice in rest)
    assert text == whole["choices"][0]["message"]["content"]
    assert [choice["finish_reason"] for choice in rest if choice["finish_reason"]] == ["length"]
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert chunks[-1]["parlay"]["exactness"] == "lossy"
    assert rest[0]["delta"]["content"].startswith("1. Dark room\n")


def test_without_a_list_of_points_the_answer_is_plain(post: Post, stream: Post) -> None:
    """An outline that never ends is cut, and has no whole line here."""
    plain = post("chat/completions", **{**ASKED, "outline": None})
    reply = post("chat/completions", **ASKED)
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == plain["choices"][0]["message"]["content"]
    assert choice["outline"] == {"points": [], "note": "written plainly: the outline has no list of points"}
    assert reply["parlay"]["exactness"] == plain["parlay"]["exactness"]
    assert reply["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"] + 8
    chunks = stream("chat/completions", **ASKED)
    texts = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(texts) == choice["message"]["content"]


def test_questions_whose_answers_build_up_are_answered_plainly(
    post: Post, refusal: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = [{"role": "user", "content": "Prove that it holds."}]
    (choice,) = post("chat/completions", **{**ASKED, "messages": sums, "outline": {}})["choices"]
    assert choice["outline"]["note"] == "written plainly: the points would depend on each other"
    error = refusal("chat/completions", **{**ASKED, "outline": {}})
    assert error["param"] == "outline.route"
    assert "the router can't ask this model yes or no" in error["message"]
    assert "take another model, or remove the router" in error["message"]
    monkeypatch.setattr(outlined, "route_words", lambda model: Words(40, 41))
    (choice,) = post("chat/completions", **{**ASKED, "outline": {"outline_tokens": 8}})["choices"]
    assert choice["outline"]["note"].startswith("written plainly")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"outline": {"points": 1}}, "outline.points", "outline.points must be between 2 and 32, got 1"),
        ({"outline": {"points": 30}}, "outline.points", "this server allows at most 16"),
        ({"outline": {"outline_tokens": 5000}}, "outline.outline_tokens", "outline.outline_tokens must be between"),
        ({"outline": {"route": "maybe"}}, "outline.route", "outline.route"),
        ({"n": 2}, "n", "outline gives one choice"),
        ({"vote": {}}, "vote", "outline can't be used with vote"),
        ({"logprobs": True}, "logprobs", "outline can't be used with logprobs"),
        ({"exactness": "bits"}, "exactness", "lossy"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options",
            "remove one of them",
        ),
        (
            {"messages": [{"role": "assistant", "content": "Hi"}]},
            "messages",
            "only where the last message is the user's",
        ),
    ],
)
def test_what_is_no_plan_is_refused(refusal: Post, fields: dict[str, Any], param: str, message: str) -> None:
    error = refusal("chat/completions", **{**ASKED, **fields})
    assert error["param"] == param
    assert message in error["message"]
    assert "\n" not in error["message"]


def test_the_server_bounds_the_outline(make_app: Callable[..., FastAPI]) -> None:
    client = TestClient(make_app(max_tokens=20, max_n=4))
    error = client.post("/v1/chat/completions", json={**ASKED, "outline": {}}).json()["error"]
    assert error["message"] == "outline.outline_tokens must be at most 20 on this server, got 160"
    error = client.post("/v1/chat/completions", json={**ASKED, "outline": {"points": 5}}).json()["error"]
    assert error["message"] == "outline.points is 5, and this server allows at most 4"


def test_a_fault_in_planning_or_in_a_section_harms_nobody_else(
    post: Post, client: TestClient, engine: AsyncLLM
) -> None:
    answer = client.post("/v1/chat/completions", json={**ASKED, "strategy": "nonsense"})
    assert answer.status_code == 400
    assert post("chat/completions", **{**ASKED, "outline": None})["choices"][0]["message"]["content"]
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
