"""Streams: chunks that add up to the whole answer, and what happens when a client leaves or time runs out."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from parlay import LLM, SamplingParams
from parlay.aio import AsyncLLM
from parlay.serve.app import create_app
from parlay.strategies.entry import DEFAULT_STRATEGY

PROMPT = "Repeat this text exactly: the quick brown fox jumps over the lazy dog, and the dog sleeps.\n\nThe text:"
MESSAGES = [{"role": "user", "content": PROMPT}]
LONG = {
    "model": "parlay-mini",
    "prompt": PROMPT,
    "max_tokens": 3000,
    "ignore_eos": True,
    "temperature": 0,
    "strategy": "none",
}
Post = Callable[..., Any]
MakeApp = Callable[..., FastAPI]


def texts(chunks: list[Any]) -> dict[int, str]:
    found: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        found[choice["index"]] = found.get(choice["index"], "") + piece
    return found


def pieces(chunks: list[Any], index: int) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(text for choice in choices for text, _ in choice.get("parlay", {}).get("pieces", []))


def test_chunks_say_who_wrote_what_where_a_lossy_rule_keeps_the_words_of_another(post: Post, stream: Post) -> None:
    wanted = {
        "prompt": PROMPT,
        "max_tokens": 24,
        "temperature": 0.8,
        "seed": 1,
        "strategy": "prompt-lookup:k=4,policy=fixed,rule=typical",
    }
    whole, chunks = post("completions", **wanted), stream("completions", **wanted)
    counts = whole["parlay"]["writers"]
    assert counts == {name: counts[name] for name in ("prompt-lookup", "target") if name in counts}
    assert sum(counts.values()) == 24
    told = [choice["parlay"] for chunk in chunks for choice in chunk["choices"]]
    named = [list(zip(each["pieces"], each["writers"], strict=True)) for each in told if "writers" in each]
    assert named
    assert all(source == writer for pairs in named for (_, source), writer in pairs)
    assert "writers" not in stream("completions", **{**wanted, "strategy": "none"})[0]["choices"][0]["parlay"]


@pytest.mark.parametrize("strategy", ["none", "prompt-lookup", "draft-model"])
def test_chunks_of_a_chat_add_up_to_the_whole_answer(post: Post, stream: Post, strategy: str) -> None:
    wanted = {"messages": MESSAGES, "max_tokens": 20, "seed": 2, "n": 2, "stop": "dog", "strategy": strategy}
    whole = post("chat/completions", **wanted)
    chunks = stream("chat/completions", **wanted)
    assert texts(chunks) == {choice["index"]: choice["message"]["content"] for choice in whole["choices"]}
    assert {index: pieces(chunks, index) for index in (0, 1)} == texts(chunks)
    for index in (0, 1):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        reasons = [choice["finish_reason"] for choice in own]
        assert reasons == [None] * (len(own) - 1) + [whole["choices"][index]["finish_reason"]]
    assert chunks[-1]["parlay"]["seed"] == 2
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_the_last_chunk_has_the_usage_if_it_is_asked_for(post: Post, stream: Post, path: str) -> None:
    fields: dict[str, Any] = {"max_tokens": 9, "temperature": 0, "ignore_eos": True}
    fields |= {"prompt": PROMPT} if path == "completions" else {"messages": MESSAGES}
    whole = post(path, **fields)
    *others, last = stream(path, stream_options={"include_usage": True}, **fields)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 9
    assert last["metrics"].keys() == whole["metrics"].keys()
    assert last["parlay"].keys() == whole["parlay"].keys()
    assert not any("metrics" in chunk for chunk in others)


def test_prompts_are_streamed_side_by_side_with_their_echo(post: Post, stream: Post) -> None:
    wanted = {"prompt": [PROMPT, "Once upon"], "n": 2, "max_tokens": 8, "seed": 5, "echo": True}
    whole = {choice["index"]: choice["text"] for choice in post("completions", **wanted)["choices"]}
    chunks = stream("completions", **wanted)
    assert texts(chunks) == whole
    assert whole[2].startswith("Once upon")
    assert chunks[-1]["parlay"]["strategy"] == DEFAULT_STRATEGY


def test_what_can_not_run_is_refused_before_a_stream_begins(refusal: Post) -> None:
    assert refusal("completions", prompt=PROMPT, stream=True, logit_bias={"99999": 1})["param"] == "logit_bias"


# ---------------------------------------------------------------------------------------------------------- the end


def wait_until_idle(engine: AsyncLLM) -> None:
    wait_until(lambda: not (engine.stats().running or engine.stats().waiting))


def wait_until(condition: Callable[[], bool]) -> None:
    """Raises TimeoutError after ten minutes."""
    end = time.monotonic() + 600
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.01)


@pytest.fixture
def unhurried(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take their time, more and more: here engine, server and client share one interpreter lock, and on a
    busy machine the engine was seen to write 3,000 tokens before the client had read one."""
    slow_down(engine, monkeypatch)


def slow_down(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = engine.llm.engine.step, itertools.count()

    def slowly() -> Any:
        time.sleep(0.005 if next(steps) < 100 else 0.1)
        return step()

    monkeypatch.setattr(engine.llm.engine, "step", slowly)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prompts", [PROMPT, [PROMPT, "Once upon"]], ids=["one", "two"])
def test_a_client_that_leaves_a_stream_ends_its_request(
    make_app: MakeApp, serve: Any, engine: AsyncLLM, n: int, prompts: Any
) -> None:
    body = LONG | {"stream": True, "n": n, "prompt": prompts}
    aborted = engine.stats().finished.get("abort", 0) + n * (len(prompts) if isinstance(prompts, list) else 1)
    with serve(make_app()) as url, httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
        next(answer.iter_lines())
        answer.close()
        wait_until(lambda: engine.stats().finished.get("abort", 0) == aborted)
        wait_until_idle(engine)


@pytest.mark.usefixtures("unhurried")
def test_a_client_that_leaves_ends_its_request_when_nothing_is_streamed(
    make_app: MakeApp, serve: Any, engine: AsyncLLM
) -> None:
    with serve(make_app()) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json=LONG, timeout=0.3)
        wait_until_idle(engine)


@pytest.fixture
def hour_in_mid_answer(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour passes for the engine as soon as a request has run for ten steps."""
    step, running, passed = engine.llm.engine.step, [0], [0.0]

    def counted() -> Any:
        running[0] = 0 if engine.llm.engine.idle else running[0] + 1
        passed[0] += 3600 * (running[0] % 10 == 0)
        return step()

    monkeypatch.setattr(engine.llm.engine, "step", counted)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    for module in ("engine_loop", "service"):
        monkeypatch.setattr(f"parlay.aio.{module}.time", later)


@pytest.mark.usefixtures("hour_in_mid_answer")
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_request_that_takes_too_long_is_ended_and_says_so(make_app: MakeApp, engine: AsyncLLM, path: str) -> None:
    client = TestClient(make_app(request_timeout=3600))
    body = {key: value for key, value in LONG.items() if key != "prompt"}
    body |= {"prompt": PROMPT} if path == "completions" else {"messages": MESSAGES}
    answer = client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "timeout"
    streamed = client.post(f"/v1/{path}", json=body | {"stream": True})
    assert streamed.status_code == 200
    last = streamed.text.rstrip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    wait_until_idle(engine)


def fails(ids: list[int], logits: Any) -> Any:
    raise RuntimeError("no such luck")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_fault_is_told_to_its_client_alone(
    client: TestClient, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    job = engine.llm.job

    def with_fault(prompt: Any, params: SamplingParams, *rest: Any) -> Any:
        return job(prompt, SamplingParams(max_tokens=4, logits_processors=[fails]), *rest)

    monkeypatch.setattr(engine.llm, "job", with_fault)
    answer = client.post("/v1/completions", json={"model": "parlay-mini", "prompt": "x", "stream": streamed})
    assert answer.status_code == (200 if streamed else 500)
    error = json.loads(answer.text.removeprefix("data: "))["error"]
    assert "no such luck" in error["message"]
    assert error["type"] == "server_error"


def test_a_bug_in_a_stream_is_in_the_log_and_not_in_the_answer(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("the password is 1234")

    monkeypatch.setattr("parlay.serve.protocol.running.Run._record", broken)
    body = {"model": "parlay-mini", "prompt": "x", "max_tokens": 2, "stream": True}
    answer = client.post("/v1/completions", json=body)
    last = answer.text.rstrip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert "1234" not in answer.text
    assert "the password is 1234" in caplog.text


def test_a_server_that_stops_says_so_to_those_whom_it_cuts_off(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain of no seconds: what is under way ends with an error, not as if it were done."""
    engine = AsyncLLM(LLM("parlay-mini", dtype="float32"))
    slow_down(engine, monkeypatch)
    app = create_app({"parlay-mini": engine})
    with serve(app) as url, httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        asyncio.run(engine.close(0))
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
