"""A request of a client: its body, whether the answer is a stream that can be resumed, and where it belongs."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json
from starlette.types import Scope

from parlay.gateway.client import Headers, passed_on
from parlay.serve.guard.workers import LIGHT_BYTES
from parlay.serve.openai.completions.body import prompts_of

RESUMABLE = frozenset({"/v1/completions", "/v1/chat/completions"})
SESSION = b"x-session-id"
_SEED_BITS = 53
"""Clients in JavaScript hold whole numbers in float64."""
_KEY_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class Question:
    """One request. ``fields`` are those of a JSON body, None for any other; ``key`` says where it belongs, if anywhere.

    ``resumable``: the body asks for a stream that another replica could go on with.
    """

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    fields: Mapping[str, Any] | None = None
    key: bytes = b""
    resumable: bool = False

    @property
    def choices(self) -> int:
        """How many choices the answer has."""
        assert self.fields is not None
        prompts = len(prompts_of(self.fields["prompt"])) if "prompt" in self.fields else 1
        return prompts * int(self.fields.get("n") or 1)

    @property
    def retried(self) -> bool:
        """Whether it may be sent again when its first replica was lost: most requests change nothing there."""
        return self.method in ("GET", "HEAD") or (self.method == "POST" and not self.path.startswith(_CHANGING))

    def message(self, authority: str, body: bytes | None = None) -> bytes:
        """The bytes for a replica, with another ``body`` if one is given."""
        body = self.body if body is None else body
        target = self.path.encode("latin-1") + (b"?" + self.query if self.query else b"")
        lines = [f"{self.method} ".encode() + target + b" HTTP/1.1", b"host: " + authority.encode()]
        lines += [name + b": " + value for name, value in self.headers]
        if body or self.method not in ("GET", "HEAD"):
            lines.append(b"content-length: %d" % len(body))
        return b"\r\n".join(lines) + b"\r\n\r\n" + body

    def with_fields(self, **more: object) -> bytes:
        """The body with more fields at its end, where they count, or with others in place of its own."""
        assert self.fields is not None
        return to_json({**self.fields, **more}) if more.keys() & self.fields.keys() else _appended(self.body, more)


_CHANGING = ("/api/pull", "/api/delete", "/api/copy", "/api/create", "/api/push")


async def read_question(scope: Scope, body: bytes) -> Question:
    """Read it, a large body in a thread. A body that is no JSON object is for the replica to refuse."""
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
    resumable = path in RESUMABLE and fields.get("stream") is True and fields.get("resume") is None
    key = _session(headers) or _place(fields)
    asked = Question(scope["method"], path, scope["query_string"], headers, body, fields, key, resumable)
    return _seeded(asked) if path in RESUMABLE and fields.get("seed") is None else asked


async def _in_thread(body: bytes) -> Any:
    return await asyncio.to_thread(from_json, body)


def _seeded(asked: Question) -> Question:
    """The same with a seed, so that each try gives one text."""
    assert asked.fields is not None
    seed = secrets.randbits(_SEED_BITS)
    body = asked.with_fields(seed=seed)
    fields = {**asked.fields, "seed": seed}
    return Question(asked.method, asked.path, asked.query, asked.headers, body, fields, asked.key, asked.resumable)


def _appended(body: bytes, more: Mapping[str, object]) -> bytes:
    """A JSON object with fields at its end."""
    start = body.rstrip()[:-1].rstrip()
    comma = b"" if start.endswith(b"{") else b","
    return start + comma + to_json(more)[1:]


def _session(headers: Headers) -> bytes:
    """The session that the client names, if it does: in one header, as Ray's routers read it."""
    return next((b"session:" + value[:_KEY_CHARACTERS] for name, value in headers if name.lower() == SESSION), b"")


def _place(fields: Mapping[str, Any]) -> bytes:
    """Make one key of prompts that begin alike, so that one replica has that beginning cached.

    Of a conversation that is everything up to the user's first message: it stays as the conversation grows.
    """
    named = fields.get("prompt_cache_key")
    if isinstance(named, str) and named:
        return b"named:" + named[:_KEY_CHARACTERS].encode(errors="replace")
    messages = fields.get("messages")
    if isinstance(messages, list):
        return b"chat:" + _beginning(messages).encode(errors="replace")
    prompt = fields.get("prompt", fields.get("input"))
    if isinstance(prompt, list):
        prompt = " ".join(map(str, prompt[:1024]))
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
