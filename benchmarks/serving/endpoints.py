"""Lists the server's endpoints: for those that answer with text, a request and the place of the text in the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

SCHEMA: Json = {
    "type": "object",
    "properties": {"ferry": {"enum": ["leaves", "waits"]}, "minutes": {"type": "integer", "minimum": 0, "maximum": 59}},
    "required": ["ferry", "minutes"],
    "additionalProperties": False,
}
SAMPLING: tuple[Json, ...] = (
    {"temperature": 0, "max_tokens": 24},
    {"temperature": 0, "max_tokens": 64},
    {"temperature": 0.8, "seed": 1, "max_tokens": 32},
    {"temperature": 0.7, "seed": 3, "top_p": 0.9, "max_tokens": 48},
    {"temperature": 1.2, "seed": 5, "top_k": 20, "max_tokens": 16},
)
"""Sampling parameters, as chat completions spell them."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint that answers with text.

    ``body(prompt, sampling)`` makes a request, ``form`` has the fields that hold its answer to `SCHEMA`, and ``text``
    reads the text of a JSON object: a whole answer, an event, or a line.
    """

    path: str
    body: Callable[[str, Mapping[str, Any]], Json]
    form: Json
    text: Callable[[Json], str]


def continued(response: str) -> Endpoint:
    """Return the endpoint of responses that continue an earlier one."""
    return Endpoint(
        "/v1/responses",
        lambda prompt, sampling: {**_input(prompt, sampling), "previous_response_id": response},
        {"text": {"format": {"type": "json_schema", "name": "ferry", "schema": SCHEMA}}},
        _response,
    )


def _said(prompt: str) -> list[Json]:
    return [{"role": "user", "content": prompt}]


def _input(prompt: str, sampling: Mapping[str, Any]) -> Json:
    others = {name: value for name, value in sampling.items() if name != "max_tokens"}
    return {"input": prompt, "max_output_tokens": sampling["max_tokens"], "store": False, **others}


def _options(sampling: Mapping[str, Any]) -> Json:
    others = {name: value for name, value in sampling.items() if name != "max_tokens"}
    return {"options": {"num_predict": sampling["max_tokens"], **others}}


def _completion(told: Json) -> str:
    return "".join(choice["text"] for choice in told["choices"])


def _chat(told: Json) -> str:
    choices = (choice.get("message") or choice["delta"] for choice in told["choices"])
    return "".join(choice.get("content") or "" for choice in choices)


def _response(told: Json) -> str:
    if told.get("object") == "response":
        return "".join(part["text"] for item in told["output"] for part in item["content"])
    return str(told["delta"]) if told["type"] == "response.output_text.delta" else ""


def _message(told: Json) -> str:
    if told["type"] == "message":
        return "".join(block["text"] for block in told["content"])
    return str(told["delta"]["text"]) if told["type"] == "content_block_delta" else ""


_FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "ferry", "schema": SCHEMA}}}
ENDPOINTS = (
    Endpoint(
        "/v1/completions", lambda prompt, sampling: {"prompt": prompt, **sampling, "logprobs": 1}, _FORMAT, _completion
    ),
    Endpoint("/v1/chat/completions", lambda prompt, sampling: {"messages": _said(prompt), **sampling}, _FORMAT, _chat),
    Endpoint(
        "/v1/messages",
        lambda prompt, sampling: {"messages": _said(prompt), **sampling},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        _message,
    ),
    Endpoint(
        "/api/chat",
        lambda prompt, sampling: {"messages": _said(prompt), **_options(sampling)},
        {"format": SCHEMA},
        lambda told: str(told["message"]["content"]),
    ),
    Endpoint(
        "/api/generate",
        lambda prompt, sampling: {"prompt": prompt, **_options(sampling)},
        {"format": SCHEMA},
        lambda told: str(told["response"]),
    ),
)
"""All endpoints that answer with text, except `continued`."""

OTHERS: tuple[tuple[str, str, Json | None], ...] = (
    ("GET", "/v1/models", None),
    ("GET", "/api/tags", None),
    ("GET", "/api/ps", None),
    ("GET", "/choices", None),
    ("GET", "/strategies", None),
    ("GET", "/metrics", None),
    ("GET", "/ready", None),
    ("POST", "/tokenize", {"messages": _said("Where is the ferry?")}),
    ("POST", "/detokenize", {"tokens": [40, 41, 42]}),
    ("POST", "/v1/messages/count_tokens", {"messages": _said("Where is the ferry?")}),
)
"""Method, path and body of requests that are answered with 200 and generate nothing."""

WRONG: tuple[Json, ...] = (
    {"strategy": "no-such-strategy"},
    {"strategy": "prompt-lookup:no_such_parameter=1"},
    {"temperature": "warm", "options": {"temperature": "warm"}},
    {"stream": "perhaps"},
    {"prompt": "word " * 10_000, "messages": _said("word " * 10_000), "input": "word " * 10_000},
    {"model": "no-such-model"},
)
"""Fields for which every endpoint refuses a body."""
