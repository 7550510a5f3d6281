"""Answers one request at a gateway: tries one replica after another until the client has every part of the answer
once."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pydantic_core import from_json, to_json
from starlette.types import Send

from parlay.gateway.client import Head, Headers, ReplicaLost, passed_on
from parlay.gateway.counts import Counts
from parlay.gateway.delivered import BLOCK_BYTES, Delivered, ErrorEvent, is_last
from parlay.gateway.question import RESUMABLE, Question
from parlay.gateway.replicas import COMES_BACK, LOOP, Exchange, Fleet, Replica, Tried
from parlay.gateway.settings import GatewaySettings
from parlay.serve.errors import MESSAGES, OLLAMA, ApiError
from parlay.serve.guard.connection import Parts
from parlay.serve.protocol.resume_comments import EVENT_STREAM, HEADER, NO

logger = logging.getLogger(__name__)

REPLICA_HEADER = b"parlay-replica"
_RESUME_HEADER = HEADER.encode()
_ELSEWHERE = frozenset({500, 502, 503, 504, LOOP})
"""If a replica answers with one of these statuses, another replica is tried."""
_STREAMS = (EVENT_STREAM.encode(), b"application/x-ndjson")


class Answer:
    """Sends one client its answer. ``cut`` tells whether the gateway is shutting down."""

    def __init__(
        self,
        asked: Question,
        fleet: Fleet,
        settings: GatewaySettings,
        counts: Counts,
        *,
        send: Send,
        parts: Parts | None,
        cut: Callable[[], bool],
    ) -> None:
        self._asked = asked
        self._fleet = fleet
        self._settings = settings
        self._counts = counts
        self._send = send
        self._parts = parts
        self._cut = cut
        self._delivered = Delivered()
        self._last: tuple[Head, int, bytes] | None = None
        """The best reply so far of a replica that failed."""
        self._error_event: tuple[Head, int, bytes] | None = None
        """The error event with which a replica ended the stream."""
        self._problem = ""
        self._loop = 0
        """The number of a replica from which the request came back to this gateway."""
        self._events = b""
        """The events that `_take` could not send at once."""
        self._ended = False
        self.started = False
        """Whether the head has been sent to the client."""

    async def give(self) -> None:
        """Try replicas until the answer is complete. Raises ApiError if none gives it."""
        tried: Tried = set()
        failures = count = 0
        while (replica := self._fleet.choose(self._asked.key, tried) or await self._wait(tried)) is not None:
            tried.add((replica.number, replica.epoch))
            try:
                with Exchange(replica) as exchange:
                    if await self._try(replica, exchange):
                        return
            except ReplicaLost as error:
                if self._delivered.done:
                    return await self._finish()
                self._note_loss(replica, error)
            before, count = count, self._delivered.count
            failures = 1 if count > before else failures + 1
            if failures > self._settings.retries or self._cut():
                break
            self._counts.retries.labels("stream" if self._delivered.opened else "request").inc()
        await self._give_up()

    async def fail(self, error: ApiError) -> None:
        """End a stream that has begun with an error in its protocol's shape."""
        self._counts.broken.inc()
        path = self._asked.path
        if path.startswith(MESSAGES):
            event = b"event: error\ndata: " + to_json(error.as_message()) + b"\n\n"
        elif path.startswith(OLLAMA):
            event = to_json({"error": error.message}) + b"\n"
        elif path.startswith("/v1/responses"):
            told = {"type": "error", "code": error.code, "message": error.message, "param": None, **error.body}
            told["sequence_number"] = self._delivered.events
            event = b"event: error\ndata: " + to_json(told) + b"\n\n"
        else:
            event = b"data: " + to_json(error.body) + b"\n\n"
        await self._send({"type": "http.response.body", "body": event})

    # ------------------------------------------------------------------------------------------------------ one replica

    async def _wait(self, tried: Tried) -> Replica | None:
        """Wait for a replica to try. If one has answered already, even with an error, do not wait for another to become
        ready."""
        seconds = self._settings.wait_seconds if self._last is None and self._error_event is None else 0
        return await self._fleet.wait(self._asked.key, tried, seconds)

    async def _try(self, replica: Replica, exchange: Exchange) -> bool:
        """Try one replica; returns whether the client has its answer. Raises ReplicaLost, possibly in the middle of the
        answer."""
        head = await exchange.send(self._asked.message(replica.address.authority, self._body()))
        header = head.get(_RESUME_HEADER).decode("latin-1")
        if self._asked.method == "HEAD":
            await self._reply(head, replica.number, b"")
        elif self._asked.resumable and head.status == 200 and header and not header.startswith(NO):
            return await self._relay(head, header, replica.number, exchange)
        elif self._delivered.opened:
            return self._refused(head, await exchange.reply().rest(self._settings.max_reply_bytes))
        elif head.status == 200 and head.get(b"content-type").startswith(_STREAMS):
            self._problem = header.removeprefix(NO).strip()
            await self._pass_on(head, replica.number, exchange)
        else:
            return await self._whole(head, replica, exchange)
        return True

    def _body(self) -> bytes | None:
        """Return the body for a replica, which asks for a resumable stream or for the rest of one; None for the
        client's own body."""
        if not self._asked.resumable:
            return None
        rest = self._delivered.resume() if self._delivered.opened else {}
        return self._asked.with_fields(resume={**self._asked.resume, **rest})

    async def _relay(self, head: Head, header: str, number: int, exchange: Exchange) -> bool:
        """Relay a resumable stream, and record what the client has."""
        if self._delivered.opened:
            self._counts.resumed.inc()
        self._delivered.begin(header, lines=not head.get(b"content-type").startswith(_STREAMS[0]))
        whole = False
        try:
            while not self._delivered.done and not whole:
                whole = await exchange.reply().pass_to(self._take)
                exchange.read_all = self._delivered.done
                events, self._events = self._events, b""
                if events:
                    await self._part(head, number, events, last=self._delivered.done)
                if self._delivered.fault is not None:
                    raise self._delivered.fault
        except ErrorEvent as error:
            if error.leaving:
                raise ReplicaLost("it shuts down") from None
            self._error_event = head, number, error.event
            if not error.elsewhere:
                await self._give_up()
            return not error.elsewhere
        if not self._delivered.done:
            raise ReplicaLost("its stream broke off")
        if not self._ended:
            await self._part(head, number, b"", last=True)
        return True

    def _take(self, data: bytes) -> bool:
        """Write the received part of a resumable stream at once. Returns False if writing, or the next part, may have
        to wait."""
        delivered = self._delivered
        events = delivered.feed(data)
        whole = delivered.done or delivered.fault is not None
        if events and (whole or not self.started or self._parts is None or not self._parts.write(events)):
            self._events = events
            return False
        return not whole

    async def _pass_on(self, head: Head, number: int, exchange: Exchange) -> None:
        """Relay a stream that can't be resumed, in whole events. Until the first event, the request can be sent to
        another replica."""
        end = b"\n\n" if head.get(b"content-type").startswith(_STREAMS[0]) else b"\n"
        kept = last = b""
        while data := await exchange.reply().read():
            events, found, kept = (kept + data).rpartition(end)
            if found:
                last = events.rpartition(end)[2]
                self._delivered.events += 1 + events.count(end)
                await self._part(head, number, events + found)
            if len(kept) > BLOCK_BYTES:
                raise ReplicaLost(f"an event of its stream has more than {BLOCK_BYTES} bytes")
        if not head.sized and self._asked.path in RESUMABLE and not is_last(kept or last):
            raise ReplicaLost("its stream broke off")
        await self._part(head, number, kept)
        await self._finish()

    async def _whole(self, head: Head, replica: Replica, exchange: Exchange) -> bool:
        body = await exchange.reply().rest(self._settings.max_reply_bytes)
        number = replica.number
        refused = head.status == 401 and bool(self._settings.keys)
        if refused:
            logger.warning(
                "replica %d refuses an API key that this gateway accepts: start both with the same --api-key-file",
                number,
            )
        if head.status == LOOP and self._asked.retried:
            self._came_back(replica)
            return False
        if (refused or head.status in _ELSEWHERE) and self._asked.retried:
            self._last = head, number, body
            return False
        json = head.get(b"content-type").startswith(b"application/json")
        if json and self._asked.fields is not None and not _looks_like_json(body):
            raise ReplicaLost("its answer says that it is JSON, and is not")
        await self._reply(head, number, body)
        return True

    def _came_back(self, replica: Replica) -> None:
        """Note that the request came back from a replica to this gateway; the log says so once."""
        self._loop = replica.number
        if not replica.loops:
            replica.loops = True
            logger.warning("replica %d at %s: %s", replica.number, replica.address.url, COMES_BACK)

    def _refused(self, head: Head, body: bytes) -> bool:
        """Note that a replica refuses to resume a stream."""
        self._problem = _message(body) or f"a replica answered with status {head.status}"
        logger.warning("a stream can't be resumed: %s", self._problem)
        return False

    def _note_loss(self, replica: Replica, error: ReplicaLost) -> None:
        """Note the loss of a replica. Raises ApiError if the client has a part that no other replica can continue, or
        if the request may not be repeated."""
        if self.started and not self._delivered.opened:
            why = self._problem or f"those of {self._asked.path} never can"
            message = f"the replica was lost ({error}), and this stream can't be resumed: {why}"
            raise ApiError(502, message, code="replica_lost") from None
        if not self._asked.retried:
            message = f"the replica was lost ({error}), and whether it has done what was asked is not known"
            raise ApiError(502, message, code="replica_lost") from None
        logger.info("replica %d was lost in a request: %s", replica.number, error)
        self._problem = str(error)

    # ------------------------------------------------------------------------------------------------------- the client

    async def _give_up(self) -> None:
        """Send the best error reply. Raises ApiError if no replica sent one."""
        if self._error_event is not None:
            self._counts.broken.inc()
            await self._part(*self._error_event)
            return await self._finish()
        if self._last is not None and not self.started:
            return await self._reply(*self._last)
        count = len(self._fleet.replicas)
        retry = {"Retry-After": "1"}
        if self._cut():
            raise ApiError(503, "this gateway is shutting down: try again", code="unavailable", headers=retry)
        if self._loop:
            raise ApiError(LOOP, f"replica {self._loop} can't be used: {COMES_BACK}")
        loops = (f"replica {one.number} can't be used: {COMES_BACK}" for one in self._fleet.replicas if one.loops)
        problem = self._problem or next(loops, "")
        why = f" ({problem})" if problem else ""
        if self._fleet.ready:
            message = f"no replica could answer this request{why}: try again"
            raise ApiError(502, message, code="replica_lost", headers=retry)
        message = f"none of the {count} replicas takes requests now{why}: try again later"
        raise ApiError(503, message, code="no_replica", headers=retry)

    async def _reply(self, head: Head, number: int, body: bytes) -> None:
        """Send a whole reply."""
        await self._start(head, number, [(b"content-length", b"%d" % len(body))] if head.status >= 200 else [])
        await self._send({"type": "http.response.body", "body": body})

    async def _part(self, head: Head, number: int, data: bytes, *, last: bool = False) -> None:
        """Send a part of a stream; before the first part, send the head."""
        if not self.started:
            await self._start(head, number, [])
        self._ended = last
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _finish(self) -> None:
        if not self._ended:
            self._ended = True
            await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, head: Head, number: int, more: Headers) -> None:
        self.started = True
        self._counts.began(head.status)
        headers = [*passed_on(head.headers, _RESUME_HEADER, b"date", b"server"), *more]
        headers.append((REPLICA_HEADER, b"%d" % number))
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})


def _looks_like_json(body: bytes) -> bool:
    """Whether a body begins and ends like an object or a list. It is not parsed, because a large one would delay all
    other requests."""
    return body[:1] + body.rstrip()[-1:] in (b"{}", b"[]")


def _message(body: bytes) -> str:
    """Return the message of an error reply; empty if it has none."""
    try:
        return str(from_json(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
