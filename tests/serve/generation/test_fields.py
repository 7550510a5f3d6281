"""Fields that real clients send: what changes the text is honoured, what can't matter is named, the rest is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from parlay import SamplingParams
from parlay.aio import AsyncLLM
from parlay.text.chat_template import render

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASKED = {"messages": [{"role": "user", "content": "Say hello."}], "temperature": 0, "max_tokens": 8}
GO_ON = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
IDLE = {
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "user": "u",
    "metadata": {"a": "b"},
    "verbosity": "medium",
    "modalities": ["text"],
    "reasoning_effort": "low",
    "cache_prompt": True,
    "chat_template_kwargs": {"enable_thinking": False},
    "no_such_field": 1,
    "options": {"num_gpu": 1},
    "repeat_last_n": 64,
}
NAMED = {*IDLE, "chat_template_kwargs.enable_thinking", "options.num_gpu"} - {"chat_template_kwargs", "options"}


def text(client: TestClient, path: str, **fields: Any) -> str:
    answer = client.post(path, json={**(ASKED if path == CHAT else GO_ON), **fields})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return str(choice["text"] if path == COMPLETIONS else choice["message"]["content"])


def refused(client: TestClient, path: str, **fields: Any) -> Any:
    answer = client.post(path, json={**(ASKED if path == CHAT else GO_ON), **fields})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"]


def test_fields_without_effect_are_named_in_a_header(client: TestClient) -> None:
    plain, answer = client.post(CHAT, json=ASKED), client.post(CHAT, json={**ASKED, **IDLE})
    assert "parlay-ignored" not in plain.headers
    assert set(answer.headers["parlay-ignored"].split(", ")) == NAMED
    assert answer.json()["choices"] == plain.json()["choices"]
    streamed = client.post(CHAT, json={**ASKED, "stream": True, "stream_options": {"include_obfuscation": True}})
    assert streamed.headers["parlay-ignored"] == "stream_options.include_obfuscation"


def test_names_of_fields_make_no_headers(client: TestClient) -> None:
    answer = client.post(CHAT, json={**ASKED, "a\r\nSet-Cookie: b": 1, "é" * 500: 2, **{f"f{n}": n for n in range(50)}})
    assert answer.status_code == 200
    assert "Set-Cookie" not in answer.headers
    assert answer.headers["parlay-ignored"].endswith("and 32 more")


def test_a_strict_server_refuses_them(make_app: Callable[..., FastAPI]) -> None:
    client = TestClient(make_app(strict=True))
    assert refused(client, CHAT, user="u") == "user"
    assert refused(client, CHAT, reasoning_effort="low") == "reasoning_effort"
    assert refused(client, CHAT, stream_options={"include_usage": True}) == "stream_options"


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"mirostat": 2}, "mirostat"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, "repeat_last_n"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"verbosity": "low"}, "verbosity"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"n_predict": 3}, "n_predict"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}, {"type": "image_url"}]}]},
         "messages[0].content[1]"),
        ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "y"}}]}, "messages[0].audio"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"superposed": True}, "superposed"),
        ({"moderation": {"model": "x", "policy": {"output": {"mode": "block"}}}}, "moderation"),
    ],
)  # fmt: skip
def test_what_would_change_the_text_is_refused_by_its_path(
    client: TestClient, fields: dict[str, Any], path: str
) -> None:
    assert refused(client, CHAT, **fields) == path


def test_other_spellings_are_known(client: TestClient) -> None:
    ours = text(client, COMPLETIONS, repetition_penalty=1.3, max_tokens=5, typical_p=0.9)
    plain = {key: value for key, value in GO_ON.items() if key != "max_tokens"}
    asked: list[dict[str, Any]] = [
        {"repeat_penalty": 1.3, "n_predict": 5, "typ_p": 0.9},
        {"options": {"repeat_penalty": 1.3, "num_predict": 5, "typical_p": 0.9}},
    ]
    for fields in asked:
        answer = client.post(COMPLETIONS, json={**plain, **fields})
        assert answer.json()["choices"][0]["text"] == ours


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"guided_regex": "up|down"}, {"up", "down"}),
        ({"guided_grammar": 'start: "left" | "right"'}, {"left", "right"}),
        ({"grammar": 'start: "left" | "right"'}, {"left", "right"}),
        ({"ebnf": 'root ::= "left" | "right"'}, {"left", "right"}),
        ({"regex": "up|down"}, {"up", "down"}),
        ({"guided_json": {"const": 7}}, {"7"}),
        ({"json_schema": {"const": 7}}, {"7"}),
        ({"response_format": {"type": "json_object", "schema": {"const": 7}}}, {"7"}),
    ],
)
def test_forms_in_other_spellings(client: TestClient, fields: dict[str, Any], allowed: set[str]) -> None:
    assert text(client, COMPLETIONS, **fields) in allowed


def test_guidance_is_honoured_and_a_negative_prompt_alone_is_named_as_idle(client: TestClient) -> None:
    """Completions read the negative prompt as it is, chats as the system message: at scale 0 it writes the text."""
    negative = "Sing a song of the sea."
    system = [{"role": "system", "content": negative}, *ASKED["messages"]]  # type: ignore[misc]
    for path, own in ((COMPLETIONS, {"prompt": negative}), (CHAT, {"messages": system})):
        asked = {"negative_prompt": negative}
        assert text(client, path, **asked, guidance_scale=0) == text(client, path, **own)
        guided = text(client, path, **asked, guidance_scale=3)
        assert text(client, path, **asked, guidance_scale=3, strategy="none") == guided
        idle = client.post(path, json={**(ASKED if path == CHAT else GO_ON), **asked})
        assert idle.headers["parlay-ignored"] == "negative_prompt"
        assert refused(client, path, guidance_scale=101) == "guidance_scale"
        assert refused(client, path, guidance_scale=2, negative_prompt="") == "negative_prompt"
    assert text(client, COMPLETIONS, **asked, guidance_scale=3) != text(client, COMPLETIONS)
    assert refused(client, COMPLETIONS, guidance_scale=2, negative_prompt="word " * 9000) == "negative_prompt"


def test_bad_words_do_not_come(client: TestClient) -> None:
    (first, *_) = re.findall("[a-z]{3,}", text(client, COMPLETIONS))
    for strategy in ("none", "prompt-lookup"):
        assert first not in re.findall("[a-z]+", text(client, COMPLETIONS, bad_words=[first], strategy=strategy))


def test_only_allowed_tokens_come(client: TestClient) -> None:
    answer = client.post(COMPLETIONS, json={**GO_ON, "allowed_token_ids": [70, 71], "logprobs": 0, "ignore_eos": True})
    (choice,) = answer.json()["choices"]
    assert len(set(choice["logprobs"]["tokens"])) <= 2


def test_ids_that_are_allowed_are_not_read_again_for_each_row(engine: AsyncLLM) -> None:
    """Others wait meanwhile: a request may name a whole vocabulary, and each sample has several rows a step."""
    params = SamplingParams(allowed_token_ids=list(range(70, 4000)))
    settled = engine.llm.job("x", params).samples[0].request.params.allowed_token_ids
    assert settled is not None
    assert list(settled) == params.allowed_token_ids
    assert memoryview(settled).nbytes == 8 * len(settled)  # type: ignore[arg-type]


def test_a_prompt_is_cut_from_its_beginning(client: TestClient, engine: AsyncLLM) -> None:
    long = "word " * 5000
    answer = client.post(COMPLETIONS, json={**GO_ON, "prompt": long + "Once upon a time", "truncate_prompt_tokens": 5})
    assert answer.json()["usage"]["prompt_tokens"] == 5
    whole = client.post(COMPLETIONS, json={**GO_ON, "prompt": long, "truncate_prompt_tokens": -1})
    assert whole.json()["usage"]["prompt_tokens"] == engine.llm.engine.max_context - 1


def test_the_best_of_several_samples(client: TestClient) -> None:
    asked = {**GO_ON, "temperature": 1, "seed": 5, "logprobs": 0}
    every = client.post(COMPLETIONS, json={**asked, "n": 4}).json()["choices"]
    best = client.post(COMPLETIONS, json={**asked, "best_of": 4, "n": 2}).json()

    def mean(choice: Any) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return float(sum(logprobs) / len(logprobs))

    expected = sorted(every, key=mean, reverse=True)[:2]
    assert [one["text"] for one in best["choices"]] == [one["text"] for one in expected]
    assert [one["index"] for one in best["choices"]] == [0, 1]
    assert best["usage"]["completion_tokens"] == 48


def test_the_last_message_is_gone_on_with(client: TestClient, engine: AsyncLLM) -> None:
    messages = [*ASKED["messages"], {"role": "assistant", "content": "Well, hello th"}]  # type: ignore[misc]
    asked = {**ASKED, "messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    answer = client.post(CHAT, json=asked).json()
    tokenizer = engine.llm.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(render(tokenizer, messages, continue_final=True), add_special_tokens=False)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert refused(client, CHAT, continue_final_message=True, add_generation_prompt=True) == "continue_final_message"


def test_functions_of_the_old_shape(client: TestClient) -> None:
    function = {"name": "lamp", "parameters": {"type": "object", "properties": {"on": {"const": True}}}}
    asked = {**ASKED, "functions": [function], "function_call": {"name": "lamp"}, "max_tokens": 64}
    choice = client.post(CHAT, json=asked).json()["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"]["name"] == "lamp"
    assert "tool_calls" not in choice["message"]
    history = [
        *ASKED["messages"],  # type: ignore[misc]
        choice["message"],
        {"role": "function", "name": "lamp", "content": "done"},
    ]
    assert client.post(CHAT, json={**ASKED, "messages": history}).status_code == 200


def test_usage_so_far_in_every_chunk(client: TestClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, asked in ((CHAT, ASKED), (COMPLETIONS, GO_ON)):
        answer = client.post(path, json={**asked, "stream": True, "stream_options": options, "n": 2})
        chunks = [line for line in answer.text.split("\n\n") if '"choices":[{' in line]
        assert len(chunks) > 1
        assert all('"usage":{"prompt_tokens":' in chunk for chunk in chunks)


def test_what_guidellm_sends(client: TestClient) -> None:
    """Its defaults, for both endpoints."""
    sent = {
        "model": "parlay-mini",
        "max_tokens": 6,
        "max_completion_tokens": 6,
        "stop": None,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    content = [{"type": "text", "text": "Say hello."}]
    bodies = ((CHAT, {"messages": [{"role": "user", "content": content}]}), (COMPLETIONS, {"prompt": "Once"}))
    for path, more in bodies:
        answer = client.post(path, json={**sent, **more})
        assert answer.status_code == 200, answer.text
        assert '"completion_tokens":6' in answer.text


def routers(answer: str) -> list[dict[str, Any]]:
    """What a reply, or a stream, tells of `auto`'s choices."""
    bodies = [json.loads(line) for line in answer.replace("data: {", "{").splitlines() if line.startswith("{")]
    told = [body.get("response", body).get("metrics") for body in bodies]
    return [metrics["router"] for metrics in told if metrics is not None]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, ASKED),
        (CHAT, {**ASKED, "messages": [{"role": "user", "content": "Prove it."}], "outline": {}}),  # answered plainly
        (COMPLETIONS, GO_ON),
        (RESPONSES, {"input": "Say hello.", "temperature": 0, "max_output_tokens": 8}),
    ],
)
@pytest.mark.parametrize("stream", [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}])
def test_what_was_chosen_in_which_steps_is_for_those_who_ask(
    client: TestClient, path: str, asked: dict[str, Any], stream: dict[str, Any]
) -> None:
    asked = {**asked, **stream, "strategy": "auto:of=prompt-lookup"}
    for unasked in ({}, {"explain": None}, {"explain": False}):
        (told,) = routers(client.post(path, json={**asked, **unasked}).text)
        assert told.keys() == {"drafters", "reasons", "kind", "power"}
    (told,) = routers(client.post(path, json={**asked, "explain": True}).text)
    assert sum(each["steps"] for each in told["life"]) == sum(told["reasons"].values()) > 0


def test_explain_is_true_or_false(client: TestClient) -> None:
    for path, asked in ((CHAT, ASKED), (COMPLETIONS, GO_ON), (RESPONSES, {"input": "Hi"})):
        for value in (1, "yes", {"life": True}):
            error = client.post(path, json={**asked, "explain": value}).json()["error"]
            assert (error["param"], error["message"]) == ("explain", "explain must be true or false")
