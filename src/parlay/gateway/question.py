"""A client's request: its body, whether its stream can be resumed, and the key that decides its replica."""

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
"""Paths with resumable streams, and the field of the body whose object has the seed ("": the body itself has it)."""
SESSION = b"x-session-id"
_SEED_BITS = 53
"""JavaScript clients keep integers in float64."""
_LLAMA_SERVER = frozenset({"/completion", "/completions", "/infill"})
_KEY_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class Question:
    """A client's request. ``fields``: the fields of a JSON body; None for other bodies. Requests with the same ``key``
    go to the same replica.

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
    """Content that the body's field ``resume`` has for every replica."""

    @property
    def retried(self) -> bool:
        """Whether the request may be sent to another replica after the first was lost, because it changes nothing on a
        replica."""
        return self.method in ("GET", "HEAD") or (self.method == "POST" and not self.path.startswith(_CHANGING))

    def message(self, authority: str, body: bytes | None = None) -> bytes:
        """Return the request's bytes for a replica, with ``body`` in place of the request's own if given."""
        body = self.body if body is None else body
        target = self.path.encode("latin-1") + (b"?" + self.query if self.query else b"")
        lines = [b"%s %s HTTP/1.1" % (self.method.encode(), target), b"host: " + authority.encode()]
        lines += [name + b": " + value for name, value in self.headers]
        if body or self.method not in ("GET", "HEAD"):
            lines.append(b"content-length: %d" % len(body))
        return b"\r\n".join(lines) + b"\r\n\r\n" + body

    def with_fields(self, **more: object) -> bytes:
        """Return the body with these fields added or replaced."""
        assert self.fields is not None
        return _with(self.body, self.fields, more)


_CHANGING = (
    *("/api/pull", "/api/delete", "/api/copy", "/api/create", "/api/push"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)


async def read_question(scope: Scope, body: bytes) -> Question:
    """Parse a request; a large body is parsed in a thread. A body that is no JSON object is passed on, so that the
    replica refuses it."""
    path = (scope["raw_path"] if "raw_path" in scope else scope["path"].encode()).decode("latin-1")
    headers = passed_on(scope["headers"], b"host", b"expect")
    fields: Any = None
    if scope["method"] == "POST" and body.lstrip()[:1] == b"{":
        fields = _parsed(body) if len(body) <= LIGHT_BYTES else await asyncio.to_thread(_parsed, body)
    if not isinstance(fields, dict):
        return Question(scope["method"], path, scope["query_string"], headers, body, key=_session(headers))
    streamed = fields.get("stream") is True or (path.startswith(OLLAMA) and fields.get("stream") is None)
    resumable = path in RESUMABLE and streamed and fields.get("resume") is None
    key = _session(headers) or _place(fields)
    resume = dict[str, Any]()
    if path in RESUMABLE and (more := _seed(path, fields)):
        if _has_several(fields.get("prompt")):
            resume = more  # with one seed in the body, two equal prompts would get the same text
        else:
            body, fields = _with(body, fields, more), {**fields, **more}
    return Question(scope["method"], path, scope["query_string"], headers, body, fields, key, resumable, resume)


def _parsed(body: bytes) -> Any:
    try:
        return from_json(body)
    except ValueError:
        return None


def _seed(path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a field with a random seed, so that each retry gives the same text; empty if the body has a seed."""
    within = RESUMABLE[path]
    holder = fields.get(within) or {} if within else fields
    if not isinstance(holder, dict) or _is_seed(holder.get("seed"), path):
        return {}
    seed = {"seed": secrets.randbits(_SEED_BITS)}
    return {within: {**holder, **seed}} if within else seed


def _is_seed(value: object, path: str) -> bool:
    """Whether the value is a seed that determines the text. Ollama treats negative numbers as no seed, and llama-server
    treats its default so."""
    if path.startswith(OLLAMA) and isinstance(value, int):
        return value >= 0
    return value is not None and not (path in _LLAMA_SERVER and value in RANDOM_SEEDS)


def _has_several(prompt: object) -> bool:
    """Whether a body's ``prompt`` is a list of prompts, rather than one prompt's ids."""
    return isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list)


def _with(body: bytes, fields: Mapping[str, Any], more: Mapping[str, object]) -> bytes:
    """Return a JSON object with these fields added at its end, or replaced."""
    if more.keys() & fields.keys():
        return to_json({**fields, **more})
    start = body.rstrip()[:-1].rstrip()
    comma = b"" if start.endswith(b"{") else b","
    return start + comma + to_json(more)[1:]


def _session(headers: Headers) -> bytes:
    """Return the session that the client names in a header, the same that Ray's routers read; empty if it names
    none."""
    for name, value in headers:
        if name == SESSION:
            return b"session:" + value[:_KEY_CHARACTERS]
    return b""


def _place(fields: Mapping[str, Any]) -> bytes:
    """Return a key that prompts with the same beginning share, so that one replica has the beginning cached.

    The key of a conversation is everything up to the user's first message, which stays the same while the conversation
    grows.
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
