"""`reason_ahead` of /v1/chat/completions and /v1/responses: the text is plain decoding's, and who can't is told so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from parlay import LLM, SamplingParams
from parlay.aio import AsyncLLM
from parlay.aio.steps_ahead import StepsDrafter, submit_ahead
from parlay.llm import steps_ahead
from parlay.llm.jobs import Job, Sample
from parlay.llm.judging import Words
from parlay.llm.outputs import StreamEvent
from parlay.llm.request_options import RequestOptions
from parlay.llm.steps_ahead import AheadParams
from parlay.serve.app import create_app
from parlay.serve.settings import Settings
from parlay.types import Event, ParlayError
from tests.serve.generation.test_streaming import slow_down

PROMPT = "The cat and the dog, the cat and the bird, the cat and the"
ASKED: dict[str, Any] = {
    "model": "parlay-mini",
    "messages": [{"role": "user", "content": PROMPT}],
    "temperature": 0,
    "max_tokens": 24,
    "reason_ahead": {"drafter": "small", "until": "sentence", "step_tokens": 5},
}


@pytest.fixture(scope="module")
def small() -> Iterator[AsyncLLM]:
    model = AsyncLLM(LLM("parlay-mini-draft", router_memory="off"))
    yield model
    asyncio.run(model.close(0))


@pytest.fixture
def both(engine: AsyncLLM, small: AsyncLLM) -> TestClient:
    app = create_app({"parlay-mini": engine, "small": small}, Settings())
    return TestClient(app, raise_server_exceptions=False)


def chat(client: TestClient, **fields: Any) -> Any:
    answer = client.post("/v1/chat/completions", json={**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_text_and_the_usage_are_those_of_plain_decoding(both: TestClient, engine: AsyncLLM) -> None:
    for sampling in ({}, {"temperature": 0.9, "seed": 3, "stop": ["e"]}, {"max_tokens": 0}):
        plain, reply = chat(both, reason_ahead=None, **sampling), chat(both, **sampling)
        (choice,), (own,) = reply["choices"], plain["choices"]
        assert choice["message"] == own["message"]
        assert choice["finish_reason"] == own["finish_reason"]
        assert reply["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
        assert reply["parlay"]["exactness"] == plain["parlay"]["exactness"]
        assert choice["reason_ahead"]["rounds"] > 0
        assert (choice["reason_ahead"]["drafted"] > 0) == (sampling != {"max_tokens": 0})
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)


def test_a_stream_has_the_tokens_as_they_are_certain(both: TestClient) -> None:
    long = {"max_tokens": 96}  # tokens that come within 10 ms share a piece, and a busy machine delivers later
    whole = chat(both, **long)
    asked = {**ASKED, **long, "stream": True, "stream_options": {"include_usage": True}}
    answer = both.post("/v1/chat/completions", json=asked)
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert (
        "".join(choice["delta"].get("content", "") for choice in choices) == whole["choices"][0]["message"]["content"]
    )
    assert len(choices) > 4
    assert choices[-1]["reason_ahead"]["drafted"] == whole["choices"][0]["reason_ahead"]["drafted"]
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_responses_have_it_too(both: TestClient) -> None:
    body = {"model": "parlay-mini", "input": PROMPT, "temperature": 0, "max_output_tokens": 16}
    plain = both.post("/v1/responses", json=body).json()
    reply = both.post("/v1/responses", json={**body, "reason_ahead": ASKED["reason_ahead"]}).json()
    assert reply["output"][0]["content"][0]["text"] == plain["output"][0]["content"][0]["text"]
    assert reply["reason_ahead"]["rounds"] > 0
    assert reply["usage"]["output_tokens"] == 16


def test_the_model_may_judge(both: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens stand for yes and no, which the toy model does not have."""
    judged = {**ASKED["reason_ahead"], "judge": "model"}
    error = both.post("/v1/chat/completions", json={**ASKED, "reason_ahead": judged}).json()["error"]
    assert error["param"] == "reason_ahead.judge"
    assert error["message"].startswith("reason_ahead.judge=model can't ask this model yes or no")
    monkeypatch.setattr(steps_ahead, "words_of", lambda model: Words(40, 41))
    reply = chat(both, reason_ahead=judged)
    assert reply["parlay"]["exactness"] == "lossy"
    assert reply["usage"]["completion_tokens"] == 24
    assert sum(reply["parlay"]["writers"].values()) == 24


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"reason_ahead": {"steps": 99}}, "reason_ahead.steps", "steps must be between 1 and 16, got 99"),
        ({"reason_ahead": {"until": "page"}}, "reason_ahead.until", "reason_ahead.until"),
        ({"reason_ahead": {"tokens": 9}}, "reason_ahead.tokens", "reason_ahead.tokens is not supported"),
        ({"outline": {"sections": 4}}, "outline.sections", "outline.sections is not supported"),
        (
            {"reason_ahead": {"drafter": "parlay-mini"}},
            "reason_ahead.drafter",
            "reason_ahead.drafter: parlay-mini can't draft",
        ),
        (
            {"reason_ahead": {"judge": "model"}, "exactness": "bits"},
            "exactness",
            "is lossy, so exactness must be lossy or missing",
        ),
        ({"exactness": "lossy:floor=0.9"}, "exactness", "no certificate covers reason_ahead"),
        ({"strategy": "denoise"}, "strategy", "strategy denoise"),
        ({"strategy": "set-block", "stream": True}, "strategy", "strategy set-block"),
        ({"n": 2}, "n", "reason_ahead gives one choice"),
        ({"vote": {}}, "vote", "reason_ahead can't be used with vote"),
        ({"outline": {}}, "outline", "reason_ahead can't be used with outline"),
        ({"logprobs": True}, "logprobs", "reason_ahead can't be used with logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format", "can't be used with response_format"),
        ({"guidance_scale": 2}, "guidance_scale", "can't be used with guidance_scale"),
    ],
)
def test_what_steps_cannot_honour_is_refused(
    both: TestClient, fields: dict[str, Any], param: str, message: str
) -> None:
    answer = both.post("/v1/chat/completions", json={**ASKED, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]
    assert "\n" not in error["message"]


def test_the_drafter_must_be_served(both: TestClient, client: TestClient) -> None:
    answer = both.post("/v1/chat/completions", json={**ASKED, "reason_ahead": {"drafter": "other"}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "reason_ahead.drafter")
    answer = client.post("/v1/chat/completions", json={**ASKED, "reason_ahead": {}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reason_ahead.drafter")
    assert "this server has only one: remove reason_ahead" in answer.json()["error"]["message"]
    assert chat(both, reason_ahead={})["choices"][0]["reason_ahead"]["rounds"] > 0, "the only other model drafts"


def test_who_leaves_ends_both_models(engine: AsyncLLM, small: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written is then there, and nothing is under way."""
    slow_down(engine, monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

    async def leave() -> None:
        job = engine.llm.job(PROMPT, params)
        drafter = StepsDrafter(small, AheadParams(until="sentence", step_tokens=5), RequestOptions())
        stream = await submit_ahead(engine, job, drafter)
        async for _ in stream:
            break
        await stream.aclose()
        assert stream.output.chosen.finish_reason == "abort"
        slow = await submit_ahead(engine, engine.llm.job(PROMPT, params), drafter, timeout=0.01)
        assert (await slow.wait()).chosen.finish_reason == "abort"
        assert slow.timed_out
        while any(model.stats().running + model.stats().waiting for model in (engine, small)):
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(leave(), 600))


@pytest.mark.parametrize("of_parts", [True, False], ids=["of its parts", "of its end"])
def test_an_output_that_cannot_be_made_is_told(
    engine: AsyncLLM, small: AsyncLLM, monkeypatch: pytest.MonkeyPatch, of_parts: bool
) -> None:
    """Nobody waits for ever."""
    job = engine.llm.job(PROMPT, SamplingParams(temperature=0, max_tokens=8), RequestOptions())
    event = Job.event

    def broken(self: Job, sample: Sample, news: Event) -> StreamEvent:
        if of_parts or (self is job and news.finish_reason is not None):
            raise ParlayError("no text of it")
        return event(self, sample, news)

    monkeypatch.setattr(Job, "event", broken)

    async def run() -> None:
        drafter = StepsDrafter(small, AheadParams(step_tokens=4), RequestOptions())
        stream = await submit_ahead(engine, job, drafter)
        await stream.wait()

    with pytest.raises(ParlayError, match="no text of it"):
        asyncio.run(asyncio.wait_for(run(), 600))
