"""A client's request: its body, whether its stream can be resumed, and the replica it belongs to."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json, to_json
from starlette.types import Scope

from parlay.gateway.client import Headers, passed_on
from parlay.serve.errors import OLLAMA
from parlay.serve.guard.workers import LIGHT_BYTES
from parlay.serve.llama_server import RANDOM_SEEDS

RESUMABLE = {
    "/v1/completions": "",
    "/v1/chat/completions": "",
    "/v1/responses": "",
    "/v1/messages": "",
    "/completion": "",
    "/completions": "",
    "/infill": "",
    "/api/chat": "options",
    "/api/generate": "options",
}
"""Paths with resumable streams, and the object of the body that has the seed ("" is the body itself)."""
SESSION = b"x-session-id"
_SEED_BITS = 53
"""JavaScript clients keep integers in float64."""
_WIDE_SEEDS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
_LLAMA_SERVER = frozenset({"/completion", "/completions", "/infill"})
_KEY_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class Question:
    """A client's request. ``fields`` are those of a JSON body, None for other bodies; requests with the same ``key``
    belong to the same replica.

    ``resumable``: the body asks for a stream that another replica can continue.
    """

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    fields: Mapping[str, Any] | None = None
    key: bytes = b""
    resumable: bool = False
    resume: Mapping[str, Any] = field(default_factory=dict)
    """The content of the body's field ``resume`` for every replica."""

    @property
    def retried(self) -> bool:
        """Whether the request may be sent again if its first replica was lost; most requests change nothing there."""
        return self.method in ("GET", "HEAD") or (self.method == "POST" and not self.path.startswith(_CHANGING))

    def message(self, authority: str, body: bytes | None = None) -> bytes:
        """The request's bytes for a replica, with ``body`` in place of its own if given."""
        body = self.body if body is None else body
        target = self.path.encode("latin-1") + (b"?" + self.query if self.query else b"")
        lines = [f"{self.method} ".encode() + target + b" HTTP/1.1", b"host: " + authority.encode()]
        lines += [name + b": " + value for name, value in self.headers]
        if body or self.method not in ("GET", "HEAD"):
            lines.append(b"content-length: %d" % len(body))
        return b"\r\n".join(lines) + b"\r\n\r\n" + body

    def with_fields(self, **more: object) -> bytes:
        """The body with these fields added, or in place of its own."""
        assert self.fields is not None
        return _with(self.body, self.fields, more)


_CHANGING = (
    *("/api/pull", "/api/delete", "/api/copy", "/api/create", "/api/push"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)


async def read_question(scope: Scope, body: bytes) -> Question:
    """Parse a request; a large body is parsed in a thread. A body that is not a JSON object is left for the replica to
    refuse."""
    path: str = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
    headers = passed_on(scope["headers"], b"host", b"expect")
    read = from_json if len(body) <= LIGHT_BYTES else _in_thread
    fields: Any = None
    if scope["method"] == "POST" and body.lstrip()[:1] == b"{":
        try:
            value = read(body)
            fields = await value if asyncio.iscoroutine(value) else value
        except ValueError:
            pass
    if not isinstance(fields, dict):
        return Question(scope["method"], path, scope["query_string"], headers, body, key=_session(headers))
    streamed = fields.get("stream") is True or (path.startswith(OLLAMA) and fields.get("stream") is None)
    resumable = path in RESUMABLE and streamed and fields.get("resume") is None
    key = _session(headers) or _place(fields)
    resume = dict[str, Any]()
    if path in RESUMABLE and (more := _seed(path, fields)):
        if _has_several(fields.get("prompt")):
            resume = more  # one seed would give two equal prompts the same text
        else:
            body, fields = _with(body, fields, more), {**fields, **more}
    return Question(scope["method"], path, scope["query_string"], headers, body, fields, key, resumable, resume)


async def _in_thread(body: bytes) -> Any:
    return await asyncio.to_thread(from_json, body)


def _seed(path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A field with a random seed, so that each retry gives the same text; empty if the body has a seed."""
    within = RESUMABLE[path]
    holder = fields.get(within) or {} if within else fields
    if not isinstance(holder, Mapping) or _is_seed(holder.get("seed"), path):
        return {}
    seed = {"seed": secrets.randbits(_SEED_BITS if path in _WIDE_SEEDS else 31)}
    return {within: {**holder, **seed}} if within else seed


def _is_seed(value: object, path: str) -> bool:
    """Whether the value determines the text; Ollama treats negative numbers as no seed, and llama-server its
    default."""
    if path.startswith(OLLAMA) and isinstance(value, int):
        return value >= 0
    return value is not None and not (path in _LLAMA_SERVER and value in RANDOM_SEEDS)


def _has_several(prompt: object) -> bool:
    """Whether a body's ``prompt`` is a list of prompts, rather than one prompt's ids."""
    return isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list)


def _with(body: bytes, fields: Mapping[str, Any], more: Mapping[str, object]) -> bytes:
    """A JSON object with these fields added at its end, or in place of its own."""
    if more.keys() & fields.keys():
        return to_json({**fields, **more})
    start = body.rstrip()[:-1].rstrip()
    comma = b"" if start.endswith(b"{") else b","
    return start + comma + to_json(more)[1:]


def _session(headers: Headers) -> bytes:
    """The session that the client names in a header, as Ray's routers read it; empty if none."""
    return next((b"session:" + value[:_KEY_CHARACTERS] for name, value in headers if name.lower() == SESSION), b"")


def _place(fields: Mapping[str, Any]) -> bytes:
    """A common key for prompts that begin alike, so that one replica has their beginning cached.

    For a conversation it is everything up to the user's first message, which stays the same as the conversation grows.
    """
    named = fields.get("prompt_cache_key")
    if isinstance(named, str) and named:
        return b"named:" + named[:_KEY_CHARACTERS].encode(errors="replace")
    messages = fields.get("messages")
    if isinstance(messages, list):
        return b"chat:" + _beginning(messages).encode(errors="replace")
    prompt = fields.get("prompt", fields.get("input"))
    if isinstance(prompt, list):
        first = prompt[0] if prompt and isinstance(prompt[0], list) else prompt
        prompt = " ".join(map(str, first[:1024]))
    return b"text:" + prompt[:_KEY_CHARACTERS].encode(errors="replace") if isinstance(prompt, str) else b""


def _beginning(messages: Sequence[Any]) -> str:
    text: list[str] = []
    for message in messages:
        if not isinstance(message, dict):
            break
        text.append(f"{message.get('role')}:{message.get('content')}"[:_KEY_CHARACTERS])
        if message.get("role") == "user":
            break
    return "\n".join(text)[: 2 * _KEY_CHARACTERS]
