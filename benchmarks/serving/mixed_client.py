"""Sends conversations to a server at once, and records each answer's text and the times of its tokens."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.serving.mixed_trace import Talk
from parlay.bench.workloads import Message

PATIENCE = 900.0
"""Seconds after which a request counts as lost."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer.

    ``first``: seconds from the request to its first piece of text. ``per_token``: seconds per token after that piece;
    None if all tokens came at once. ``ended``: seconds from the start of the run to its end.
    """

    talk: str
    kind: str
    turn: int
    text: str
    tokens: int
    first: float
    per_token: float | None
    ended: float


async def play(
    client: httpx.AsyncClient,
    talks: Sequence[Talk],
    body: Mapping[str, object],
    *,
    starts: Sequence[float] | None = None,
    at_once: int | None = None,
) -> list[Answer]:
    """Return all answers. Conversations begin at ``starts``, in seconds from now, or when fewer than ``at_once`` run.

    ``body`` has the fields that all requests share. Raises ValueError if a request is refused, and HTTPError.
    """
    desk, gate = _Desk(client, body, time.perf_counter()), asyncio.Semaphore(at_once or len(talks))

    async def held(talk: Talk, start: float) -> list[Answer]:
        await asyncio.sleep(start)
        async with gate:
            return [answer async for answer in desk.answers(talk)]

    each = zip(talks, starts or [0.0] * len(talks), strict=True)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(held(talk, start)) for talk, start in each]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [answer for task in tasks for answer in task.result()]


@dataclass(frozen=True, slots=True)
class _Desk:
    """Holds conversations. ``body`` has the fields that all requests share; ``began`` is the start of the run."""

    client: httpx.AsyncClient
    body: Mapping[str, object]
    began: float

    async def answers(self, talk: Talk) -> AsyncIterator[Answer]:
        """Yield a conversation's answers, turn by turn."""
        messages = list(talk.messages)
        for turn in range(1 + len(talk.follow_ups)):
            answer = await self._ask(talk, turn, messages)
            yield answer
            if turn < len(talk.follow_ups):
                messages += [Message("assistant", answer.text), Message("user", talk.follow_ups[turn])]

    async def _ask(self, talk: Talk, turn: int, messages: Sequence[Message]) -> Answer:
        asked, heard = time.perf_counter(), _Heard()
        sent = {**self.body, **_asking(talk), "messages": [message._asdict() for message in messages]}
        async with self.client.stream("POST", "/v1/chat/completions", json=sent) as reply:
            if reply.status_code != 200:
                raise ValueError(f"{talk.kind} {talk.id} is refused: {(await reply.aread()).decode()[:300]}")
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    heard.take(json.loads(line[6:]), time.perf_counter())
        if not heard.tokens:
            raise ValueError(f"{talk.kind} {talk.id} has no whole answer")
        first, ended = (heard.first or heard.last) - asked, heard.last - self.began
        return Answer(talk.id, talk.kind, turn, heard.text, heard.tokens, first, heard.per_token, ended)


def _asking(talk: Talk) -> dict[str, object]:
    """Return the fields that state the form of the answer."""
    fields: dict[str, object] = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    if talk.schema is not None:
        form = {"name": talk.kind, "schema": talk.schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": form}
    return fields


@dataclass(slots=True)
class _Heard:
    """The sum of an answer's chunks."""

    text: str = ""
    tokens: int = 0
    head: int = 0
    """Tokens of the first piece."""
    first: float = 0.0
    last: float = 0.0

    def take(self, chunk: Mapping[str, Any], now: float) -> None:
        """Add a chunk. Raises ValueError if it is an error."""
        if "error" in chunk:
            raise ValueError(f"an answer failed: {chunk['error']['message']}")
        if chunk.get("usage"):
            self.tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            pieces = choice.get("parlay", {}).get("pieces", ())
            self.text += choice["delta"].get("content") or ""
            if pieces and not self.first:
                self.first, self.head = now, len(pieces)
            self.last = now if pieces or not self.last else self.last

    @property
    def per_token(self) -> float | None:
        later = self.tokens - self.head
        return (self.last - self.first) / later if later > 0 and self.last > self.first > 0 else None
