"""A stream that one server began and another goes on with is the stream that one server alone would have sent."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from parlay import LLM
from parlay.aio import AsyncLLM
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import read_config
from parlay.options import LoadOptions
from parlay.serve.app import create_app
from parlay.serve.chat.answers import AnswerShape, Arguments, Begin, Delta, Text, Thought
from parlay.serve.chat.calls import FORMATS, PLAIN
from parlay.serve.protocol.resume_comments import HEADER
from parlay.serve.settings import Settings
from parlay.testing.adapters import save_adapter

MESSAGES = [{"role": "user", "content": "Tell me about the sea, please."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}},
    },
}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 10}}, "required": ["name"]}
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 16}
TEXT: dict[str, Any] = {"prompt": "The sea is", "max_tokens": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("completions", {**TEXT, "temperature": 0, "strategy": "prompt-lookup"}),
    "sampled, several": ("completions", {**TEXT, "seed": 7, "n": 2, "prompt": ["The sea is", "A ship"]}),
    "stop text": ("completions", {**TEXT, "seed": 3, "stop": ["e s", "zz"], "min_tokens": 3, "max_tokens": 40}),
    "echo, usage": ("completions", {**TEXT, "seed": 1, "echo": True, "stream_options": {"include_usage": True}}),
    "logprobs": ("completions", {**TEXT, "seed": 5, "logprobs": 2, "max_tokens": 8}),
    "penalties": ("completions", {**TEXT, "seed": 5, "presence_penalty": 1.5, "repetition_penalty": 1.3}),
    "bad words": ("completions", {**TEXT, "seed": 5, "bad_words": ["the", "a"], "ignore_eos": True}),
    "chat": ("chat/completions", {**CHAT, "seed": 2, "n": 2, "stream_options": {"continuous_usage_stats": True}}),
    "chat logprobs": ("chat/completions", {**CHAT, "seed": 2, "logprobs": True, "top_logprobs": 1, "max_tokens": 6}),
    "call": ("chat/completions", {**CHAT, "seed": 4, "tools": [TOOL], "tool_choice": "required", "max_tokens": 40}),
    "form": (
        "chat/completions",
        {
            **CHAT,
            "temperature": 0,
            "max_tokens": 40,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        },
    ),
}


def begin(client: TestClient, path: str, fields: dict[str, Any], resume: object) -> tuple[str, list[str]]:
    """The header and the events of a stream, comments included."""
    body = {"model": "parlay-mini", "stream": True, **fields, "resume": resume}
    answer = client.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.headers[HEADER], [block for block in answer.text.split("\n\n") if block]


def read(blocks: list[str]) -> tuple[dict[int, list[int]], list[int], list[dict[str, Any]]]:
    """The tokens, the choices that ended, and the chunks."""
    tokens: dict[int, list[int]] = defaultdict(list)
    ended, chunks = [], []
    for line in "\n".join(blocks).split("\n"):
        if line.startswith(": "):
            kind, *numbers = line[2:].split(" ")
            if kind not in ("opened", "done"):
                index, *ids = map(int, numbers)
                tokens[index] += ids
                ended += [index] if kind == "end" else []
        elif line != "data: [DONE]":
            chunks.append(json.loads(line.removeprefix("data: ")))
    return tokens, ended, chunks


def said(chunks: list[dict[str, Any]]) -> dict[Any, Any]:
    """What a client makes of chunks: each text joined, log-probabilities in a row, ends, usage, and all names."""
    found: dict[Any, Any] = defaultdict(str)
    rows: dict[Any, list[Any]] = defaultdict(list)
    for chunk in chunks:
        found["names"] = (chunk["id"], chunk["created"], chunk["model"])
        if chunk.get("usage"):
            found["usage"] = {key: value for key, value in chunk["usage"].items() if not key.endswith("_details")}
        for choice in chunk["choices"]:
            own, delta = choice["index"], choice.get("delta", {})
            found[own, "text"] += choice.get("text", "") + (delta.get("content") or "")
            rows[own, "roles"] += [delta["role"]] if "role" in delta else []
            for call in delta.get("tool_calls", []):
                found[own, "call", call["index"], "name"] += call["function"].get("name", "")
                found[own, "call", call["index"], "arguments"] += call["function"]["arguments"]
            for name, column in (choice["logprobs"] or {}).items():
                rows[own, name] += column or []
            found[own, "end"] += choice["finish_reason"] or ""
    return {**found, **rows}


@pytest.mark.parametrize("case", CASES)
def test_a_stream_cut_anywhere_goes_on_without_a_part_lost_or_said_twice(client: TestClient, case: str) -> None:
    path, fields = CASES[case]
    header, blocks = begin(client, path, fields, {})
    whole = said(read(blocks)[2])
    opened = next(place for place, block in enumerate(blocks) if block.startswith(": opened"))
    fingerprint, name, created = header.split(" ")
    choices = fields.get("n", 1) * (len(fields["prompt"]) if isinstance(fields.get("prompt"), list) else 1)
    for cut in sorted({opened + 1, opened + 2, (opened + len(blocks)) // 2, len(blocks) - 2, len(blocks) - 1}):
        while not blocks[cut - 1].startswith(": "):  # an event counts with the next that has a comment
            cut -= 1
        tokens, ended, chunks = read(blocks[:cut])
        resume = {
            "fingerprint": fingerprint,
            "id": name,
            "created": int(created),
            "token_ids": [tokens[index] for index in range(choices)],
            "ended": ended,
        }
        again, rest = begin(client, path, fields, resume)
        assert again == header
        assert said([*chunks, *read(rest)[2]]) == whole, cut
        assert rest[-1] == ": done\ndata: [DONE]"


def test_like_prompts_draw_texts_of_their_own_from_the_seed_of_a_gateway(client: TestClient) -> None:
    fields = {**TEXT, "prompt": ["The sea is"] * 2}
    header, blocks = begin(client, "completions", fields, {"seed": 5})
    tokens, _, chunks = read(blocks)
    assert tokens[0] != tokens[1]
    fingerprint, name, created = header.split(" ")
    resume = {"fingerprint": fingerprint, "id": name, "created": int(created), "seed": 5}
    resume["token_ids"] = [tokens[index][:6] for index in range(2)]
    rest = read(begin(client, "completions", fields, resume)[1])[0]
    assert [tokens[index][6:] for index in range(2)] == [rest[index] for index in range(2)]
    assert said(chunks)[0, "text"] != said(chunks)[1, "text"]


def test_a_resumed_stream_may_be_resumed(client: TestClient) -> None:
    fields = {**TEXT, "seed": 9}
    header, blocks = begin(client, "completions", fields, {})
    fingerprint, name, created = header.split(" ")
    resume: dict[str, Any] = {"fingerprint": fingerprint, "id": name, "created": int(created), "ended": []}
    tokens, times = read(blocks)[0][0], 0
    before = tokens[:3]
    while len(before) < len(tokens):  # the server decides how many tokens an event has, so the cuts are made here
        again, rest = begin(client, "completions", fields, {**resume, "token_ids": [before]})
        after, ended, chunks = read(rest)
        assert (again, before + after[0], ended) == (header, tokens, [0])
        text = client.post("/detokenize", json={"tokens": after[0]}).json()["prompt"]
        assert said(chunks)[0, "text"] == text
        before, times = before + after[0][:4], times + 1
    assert times > 1


def test_nothing_is_said_of_tokens_unless_it_is_asked_for(client: TestClient) -> None:
    answer = client.post("/v1/completions", json={"model": "parlay-mini", "stream": True, **TEXT})
    assert HEADER not in answer.headers
    assert "\n: " not in answer.text


def test_a_stream_that_draws_by_another_rule_can_not_be_resumed(client: TestClient) -> None:
    strategy = "prompt-lookup:rule=typical"
    header, blocks = begin(client, "completions", {**TEXT, "strategy": strategy}, {})
    assert header.startswith("no: strategy prompt-lookup is of exactness lossy")
    assert not [block for block in blocks if block.startswith(":")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"resume": {"fingerprint": "0" * 64}}, "weights, build, settings or prompt are not the same"),
        ({"seed": 8}, "weights, build, settings or prompt are not the same"),
        ({"prompt": "The sea was"}, "weights, build, settings or prompt are not the same"),
        ({"resume": {"token_ids": [[1], [2]]}}, "holds 2 lists, and the request has 1 choices"),
        ({"resume": {"token_ids": [[40] * 16]}}, "max_tokens must be above 16"),
        ({"resume": {"token_ids": [[10**6]]}}, "not from 0 to 4095"),
        ({"resume": {"ended": [1]}}, "must name choices from 0 to 0"),
        ({"resume": {"id": None}}, "all of fingerprint, id, created and token_ids, or none"),
        ({"resume": {"id": "a\r\nset-cookie: b"}}, "resume.id"),
        ({"resume": {"id": "a b"}}, "resume.id"),
        ({"resume": {"id": "\u20ac"}}, "resume.id"),
        ({"stream": False}, "resume works only with stream true"),
    ],
)
def test_what_can_not_be_gone_on_with_is_refused(client: TestClient, change: dict[str, Any], words: str) -> None:
    fields = {"model": "parlay-mini", "stream": True, **TEXT, "seed": 7}
    header = begin(client, "completions", fields, {})[0]
    fingerprint, name, created = header.split(" ")
    resume = {"fingerprint": fingerprint, "id": name, "created": int(created), "token_ids": [[]]}
    more = change.pop("resume", {})
    answer = client.post("/v1/completions", json={**fields, **change, "resume": {**resume, **more}})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


def test_written_tokens_count_as_output_in_usage_and_not_as_work(make_app: Callable[..., FastAPI]) -> None:
    client = TestClient(make_app())
    fields = {**TEXT, "seed": 7, "stream_options": {"include_usage": True}, "ignore_eos": True}
    header, blocks = begin(client, "completions", fields, {})
    fingerprint, name, created = header.split(" ")
    tokens = [token for ids in read(blocks)[0].values() for token in ids]
    resume = {"fingerprint": fingerprint, "id": name, "created": int(created), "token_ids": [tokens[:10]]}
    chunks = read(begin(client, "completions", fields, resume)[1])[2]
    assert chunks[-1]["usage"]["completion_tokens"] == 16
    text = client.get("/metrics").text
    total = next(line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total"))
    assert float(total.split()[-1]) == 16 + 6


FUNCTION = {"name": "weather", "description": "The weather.", "input_schema": TOOL["function"]["parameters"]}
RESPONSE_TOOL = {"type": "function", **TOOL["function"]}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": ("/v1/messages", {**CHAT, "seed": 2, "stop_sequences": ["zzz"]}),
    "messages, call": (
        "/v1/messages",
        {**CHAT, "seed": 4, "max_tokens": 40, "tools": [FUNCTION], "tool_choice": {"type": "any"}},
    ),
    "responses": ("/v1/responses", {"input": "Tell me about the sea.", "seed": 2, "max_output_tokens": 16}),
    "responses, call": (
        "/v1/responses",
        {"input": "Rome?", "seed": 4, "max_output_tokens": 40, "tools": [RESPONSE_TOOL], "tool_choice": "required"},
    ),
    "chat of Ollama": (
        "/api/chat",
        {"messages": MESSAGES, "options": {"seed": 5, "num_predict": 16}, "logprobs": True},
    ),
    "generate of Ollama": (
        "/api/generate",
        {"prompt": "The sea", "raw": True, "options": {"seed": 5, "num_predict": 16}},
    ),
    "llama-server": ("/completion", {"prompt": "The sea", "seed": 5, "n_predict": 16, "temperature": 1.0}),
}
VOLATILE = frozenset(
    {"created_at", "metrics", "parlay", "timings", "tokens", "tokens_predicted"}
    | {f"{name}_duration" for name in ("total", "load", "prompt_eval", "eval")}
    | {"cache_read_input_tokens", "input_tokens", "input_tokens_details", "logprobs"}
)
"""What does not belong to the text, or is cut as steps happen to fall."""


def events_of(blocks: list[str]) -> list[Any]:
    """What stands in blocks of either kind of stream, without comments."""
    lines = [line for line in "\n".join(blocks).split("\n") if line and not line.startswith((":", "event:"))]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return "toolu" if isinstance(value, str) and value.startswith("toolu_") else value


def folded(events: list[Any]) -> list[list[Any]]:
    """Events as a client joins them: pieces of one text that follow each other are one."""
    found: list[list[Any]] = []
    for event in map(plain, events):
        event.pop("sequence_number", None)
        text = ""
        for holder, key in ((event.get("delta"), "text"), (event.get("delta"), "partial_json"), (event, "delta")):
            if isinstance(holder, dict) and isinstance(holder.get(key), str):
                text, holder[key] = holder[key], ""
        for holder, key in ((event.get("message"), "content"), (event, "response"), (event, "content")):
            if isinstance(holder, dict) and isinstance(holder.get(key), str):
                text, holder[key] = holder[key], ""
        if found and found[-1][0] == event:
            found[-1][1] += text
        else:
            found.append([event, text])
    return found


@pytest.mark.parametrize("case", OTHERS)
def test_streams_of_other_protocols_go_on_too(client: TestClient, case: str) -> None:
    path, fields = OTHERS[case]

    def ask(resume: object) -> tuple[str, list[str]]:
        answer = client.post(path, json={"model": "parlay-mini", "stream": True, **fields, "resume": resume})
        assert answer.status_code == 200, answer.text
        return answer.headers[HEADER], [block for block in answer.text.split("\n\n") if block]

    header, blocks = ask({})
    whole = folded(events_of(blocks))
    fingerprint, name, created = header.split(" ")
    commented = [place for place, block in enumerate(blocks) if block.startswith(": ")]
    assert blocks[-1].startswith(": done\n")
    whole_parts = commented[:-1]  # the last one ends the stream; a slow reader may get all tokens with it
    for cut in {*whole_parts[:2], whole_parts[len(whole_parts) // 2], whole_parts[-1]}:
        told = read_tokens(blocks[: cut + 1])
        begun = events_of(blocks[: cut + 1])
        resume = {"fingerprint": fingerprint, "id": name, "created": int(created), "token_ids": told}
        again, rest = ask({**resume, "events": len(begun)})
        assert again == header
        assert rest[0] == ": opened"
        events = [*begun, *events_of(rest)]
        assert folded(events) == whole, cut
        numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
        assert numbers == list(range(len(numbers)))


def read_tokens(blocks: list[str]) -> list[list[int]]:
    """The tokens of the one choice that a stream has."""
    words = [block.split("\n")[0].split(" ") for block in blocks if block.startswith(": tokens ")]
    return [[int(number) for _, _, _, *ids in words for number in ids]]


def test_a_response_with_log_probabilities_says_why_it_can_not_be_resumed(client: TestClient) -> None:
    body = {"model": "parlay-mini", "stream": True, "input": "Hello", "max_output_tokens": 2, "resume": {}}
    answer = client.post("/v1/responses", json={**body, "include": ["message.output_text.logprobs"]})
    assert answer.headers[HEADER].startswith("no: its last event repeats all log-probabilities")


ANSWERS = [
    "<think>\nSome thought.\n</think>\n\nThe answer. ",
    'Well: <tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": [1, 2]}}\n</tool_call> and more',
    '{"name": "weather", "arguments": {"city": "S\\u00e3o"}}',
    '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]',
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
    "no call < at { all </think> here",
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_is_said_of_an_answer_so_far_does_not_depend_on_how_it_came(answer: str) -> None:
    """So a replica that is given a stream's tokens at once has said what the one before it had."""
    for calls in [None, PLAIN, *FORMATS]:
        for thoughts in ("none", "maybe", "begun"):
            shape = AnswerShape(calls=calls, functions={"weather": {}}, thoughts=thoughts)
            slow, parts = shape.reader(), list[Delta]()
            for end, letter in enumerate(answer, start=1):
                parts += slow.feed(letter)
                assert joined(shape.reader().feed(answer[:end])) == joined(parts), (calls, thoughts, answer[:end])


def joined(deltas: list[Delta]) -> dict[Any, str]:
    found: dict[Any, str] = defaultdict(str)
    for delta in deltas:
        match delta:
            case Begin():
                found["begin", delta.call] = delta.name
            case Arguments():
                found["arguments", delta.call] += delta.text
            case Thought() | Text():
                found[type(delta)] += delta.text
    return found


def test_a_merged_adapter_is_other_weights_and_another_context_another_stream(tmp_path: Path) -> None:
    """So no gateway takes such servers for equal ones."""

    def told(**options: Any) -> tuple[str, str]:
        with LLM("parlay-mini", router_memory="off", **options) as llm:
            client = TestClient(create_app({"parlay-mini": AsyncLLM(llm)}, Settings()))
            identity = client.get("/identity").json()
            header, _ = begin(client, "completions", {**TEXT, "seed": 3, "max_tokens": 2}, {})
            return identity["models"], header.split(" ")[0]

    folder = save_adapter(tmp_path, read_config(resolve("parlay-mini")), alpha=40)
    plain, merged, short = told(), told(load=LoadOptions(lora=str(folder))), told(max_model_len=64)
    assert len({plain[0], merged[0]}) == len({plain[1], merged[1]}) == 2
    assert plain[0] == short[0]
    assert plain[1] != short[1]
