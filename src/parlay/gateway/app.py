"""Makes the gateway's application, which stands in front of several replicas."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Sequence
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from parlay.gateway.answer import Answer
from parlay.gateway.client import NoFiles, ReplicaLost, passed_on
from parlay.gateway.counts import Counts
from parlay.gateway.question import Question, read_question
from parlay.gateway.replicas import LOOP, Exchange, Fleet
from parlay.gateway.settings import MOST_REPLICAS, Address, GatewaySettings
from parlay.serve.errors import ApiError
from parlay.serve.guard.auth import Limiter
from parlay.serve.guard.connection import LEAVING, PARTS, Leaving, Parts
from parlay.serve.middleware import Admission, BodyLimit, Guard
from parlay.serve.request_ids import HEADER, naming, request_id
from parlay.serve.settings import Settings

_METRICS = re.compile(r"/replicas/([0-9]{1,3})/metrics")
_LOOP = ApiError(LOOP, "this request came from this gateway itself: remove the gateway's own address from --replica")
_HEALTH = frozenset({"/health", "/v1/health", "/ping", "/ready"})


class Gateway:
    """An ASGI application that passes requests to replicas; ``fleet`` must be started in the same event loop."""

    def __init__(self, addresses: Sequence[Address], settings: GatewaySettings) -> None:
        self.settings = settings
        self.fleet = Fleet(addresses, settings)
        self.counts = Counts(self.fleet.replicas)
        own = Settings(
            keys=tuple(settings.keys),
            own_limits=settings.keys,
            hosts=settings.hosts,
            cors_origins=("*",),  # the replicas decide which pages may send requests
            max_body_bytes=settings.max_body_bytes,
            concurrency=settings.concurrency,
        )
        self.limiter = Limiter(own)
        self._cut = False
        inner: ASGIApp = BodyLimit(self._answer, own)
        self._app = Guard(Admission(inner, self.limiter), own)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._lifespan(receive, send)
        await self._app(scope, receive, naming(scope, send))

    async def shut_down(self, *, at_once: bool = False) -> None:
        """Refuse new requests, let those under way finish within the settings' limit, then close."""
        self.limiter.shut = True
        try:
            async with asyncio.timeout(0 if at_once else self.settings.drain_seconds):
                while self.limiter.active:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pass
        self._cut = True
        await self.fleet.close()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self.fleet.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.shut_down()
                return await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, own = scope["path"], self.settings.via.own
        via = b", ".join([value for name, value in scope["headers"] if name == b"via"])
        if path in _HEALTH:
            return await self._health(path, via)(scope, receive, send)
        if own in via:
            return await _LOOP.response(path)(scope, receive, send)
        if path == "/metrics":
            return await Response(self.counts.render(), media_type=CONTENT_TYPE)(scope, receive, send)
        others = [header for header in scope["headers"] if header[0] != HEADER]
        scope = {**scope, "headers": [*others, (HEADER, request_id(scope).encode()), (b"via", own)]}
        if path.startswith("/replicas/") and (match := _METRICS.fullmatch(path)) is not None:
            return await (await self._metrics_of(int(match[1]), scope))(scope, receive, send)
        asked = await read_question(scope, (await receive())["body"])  # complete, thanks to `BodyLimit`
        state = scope["state"]
        parts: Parts | None = state.get(PARTS)
        answer = Answer(asked, self.fleet, self.settings, self.counts, send=send, parts=parts, cut=lambda: self._cut)
        try:
            await _while_client_waits(state.get(LEAVING), receive, answer.give())
        except _ClientGone:
            pass
        except ApiError as error:
            if answer.started:
                return await answer.fail(error)
            self.counts.began(error.status)
            await error.response(path)(scope, receive, send)

    async def _metrics_of(self, number: int, scope: Scope) -> Response:
        """Return the metrics of one replica, which clients may not be able to reach themselves."""
        replica = next((one for one in self.fleet.replicas if one.number == number), None)
        if replica is None:
            missing = ApiError(404, f"there is no replica {number} here, only {len(self.fleet.replicas)}")
            return missing.response(scope["path"])
        asked = Question("GET", "/metrics", b"", passed_on(scope["headers"], b"host"), b"")
        try:
            with Exchange(replica) as exchange:
                head = await exchange.send(asked.message(replica.address.authority))
                body = await exchange.reply().rest(self.settings.max_reply_bytes)
        except NoFiles as error:
            return error.response(scope["path"])
        except ReplicaLost as error:
            message = f"replica {number} was lost: {error}"
            return ApiError(502, message, code="replica_lost").response(scope["path"])
        return Response(body, head.status, media_type=head.get(b"content-type").decode("latin-1"))

    def _health(self, path: str, via: bytes) -> Response:
        """Return the replicas' states by number. Clients do not learn their addresses.

        A gateway learns that its requests would come back: always if it asks itself; if it asks another one, only
        while that reaches a server through it alone. For this, a ready gateway names in the header Via the gateways
        through which it reaches a server, itself first (a path vector, as in BGP, RFC 4271). So gateways that have
        each other as replicas do not go on calling each other ready when all others are lost.
        """
        self.settings.via.note_askers(via)
        states = {str(replica.number): replica.state for replica in self.fleet.replicas}
        asker, own = via.partition(b",")[0], self.settings.via.own
        paths = [one.through for one in self.fleet.ready if not {asker, own} & {*one.through}]
        ready = bool(paths) and not self.limiter.shut
        if via.startswith(own) or (own in via and not ready):
            return _LOOP.response(path)
        content = to_json({"status": "ok" if ready else "unavailable", "replicas": states})
        path_of = b", ".join([own, *min(paths, key=len, default=())])
        name = {"via": path_of.decode()} if asker else None
        return Response(content, 200 if ready else 503, name, "application/json")


class _ClientGone(Exception):
    """Raised when the client has closed the connection."""


async def _while_client_waits(leaving: Leaving | None, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work while the client waits for it. Raises _ClientGone when the client leaves.

    The work runs in the caller's task, because a task of its own would cost time in each request. If the server gives
    no ``leaving``, a task watches for the client's disconnection.
    """
    own = asyncio.current_task()
    assert own is not None
    watcher = None
    if leaving is None:
        leaving = Leaving()
        watcher = asyncio.create_task(_watch(receive, leaving))
    cancel = own.cancel
    leaving.tell.add(cancel)
    try:
        if leaving.gone:
            work.close()
            raise _ClientGone
        await work
    except asyncio.CancelledError:
        if not leaving.gone:
            raise
        own.uncancel()
        raise _ClientGone from None
    finally:
        leaving.tell.discard(cancel)
        if watcher is not None:
            watcher.cancel()


async def _watch(receive: Receive, leaving: Leaving) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    leaving.note()


def create_gateway(addresses: Sequence[Address], settings: GatewaySettings | None = None) -> Gateway:
    """Make an ASGI application for the replicas at these addresses. Raises ValueError for no or too many replicas."""
    if not 1 <= len(addresses) <= MOST_REPLICAS:
        raise ValueError(f"--replica must be given 1 to {MOST_REPLICAS} times, got {len(addresses)}")
    if len(set(addresses)) < len(addresses):
        raise ValueError("the same --replica is given twice: remove one of them")
    return Gateway(addresses, settings or GatewaySettings())
