"""The replicas behind a gateway: which of them are ready, which one a request goes to, and what runs on each."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal

from parlay.gateway.client import Connection, Head, Pool, ReplicaLost
from parlay.gateway.settings import Address, GatewaySettings

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "draining", "lost", "refused"]
_OPEN = (
    "it asks for no key, and other machines can reach this gateway: give the replicas keys, or the gateway --no-auth"
)
Tried = set[tuple[int, int]]
"""Replicas that a request has been to, each by number and epoch."""


class Exchange:
    """One request on one replica. It ends with ReplicaLost when the replica is lost, or silent for too long."""

    def __init__(self, replica: Replica, deadline: asyncio.Timeout, silence_seconds: float) -> None:
        self._replica = replica
        self._deadline = deadline
        self._seconds = silence_seconds
        self._connection: Connection | None = None

    async def send(self, request: bytes) -> Head:
        """Send a whole request and return the reply's head. Raises ReplicaLost.

        A kept connection that the replica has closed meanwhile is no loss: the request then takes a new one.
        """
        self._connection = await self._replica.pool.take()
        try:
            return await self._connection.send(request)
        except ReplicaLost:
            if not self._connection.used or self._connection.heard:
                raise
        self._connection = await self._replica.pool.take(fresh=True)
        return await self._connection.send(request)

    async def read(self) -> bytes:
        """The next part of the reply's body; empty at its end. Raises ReplicaLost."""
        assert self._connection is not None
        data = await self._connection.read()
        if not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time() + self._seconds)
        return data

    async def rest(self, most: int) -> bytes:
        """The whole body. Raises ReplicaLost, also for one of more than ``most`` bytes."""
        body = bytearray()
        while data := await self.read():
            body += data
            if len(body) > most:
                raise ReplicaLost(f"its answer has more than {most} bytes")
        return bytes(body)

    def end(self) -> None:
        if self._connection is not None:
            self._replica.pool.give_back(self._connection)


class Replica:
    """One server. ``number`` counts from 1; ``epoch`` counts how often it became ready. Lives in one event loop."""

    def __init__(self, number: int, address: Address, settings: GatewaySettings) -> None:
        self.number = number
        self.address = address
        self.pool = Pool(address, settings.connect_seconds)
        self.state: State = "starting"
        self.epoch = 0
        self.in_flight = 0
        self.losses = 0
        self._settings = settings
        self._deadlines: set[asyncio.Timeout] = set()
        self._look_again = asyncio.Event()

    @asynccontextmanager
    async def exchange(self) -> AsyncIterator[Exchange]:
        """Room for one request. Raises ReplicaLost for every way in which the replica fails to answer."""
        loop, seconds = asyncio.get_running_loop(), self._settings.silence_seconds
        self.in_flight += 1
        deadline = asyncio.timeout(seconds)
        exchange = Exchange(self, deadline, seconds)
        self._deadlines.add(deadline)
        began = loop.time()
        try:
            async with deadline:
                yield exchange
        except TimeoutError:
            waited = loop.time() - began
            reason = f"no byte came for {seconds:g} seconds" if self.state == "ready" else "it does not answer"
            self.note_loss(f"{reason} ({waited:.1f} seconds after the request)")
            raise ReplicaLost(reason) from None
        except ReplicaLost as error:
            self.note_loss(str(error))
            raise
        finally:
            self._deadlines.discard(deadline)
            self.in_flight -= 1
            exchange.end()

    def note_loss(self, reason: str) -> None:
        """Send it nothing until it answers again: that is looked at now."""
        if self.state == "ready":
            self._change("lost", reason)
        self._look_again.set()

    def abandon(self) -> None:
        """End what is under way on it."""
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(now)

    async def watch(self, changed: asyncio.Event) -> None:
        """Look after its health until cancelled. ``changed`` is set whenever it becomes ready."""
        while True:
            await self._look()
            if self.state == "ready":
                changed.set()
            self._look_again.clear()
            try:
                async with asyncio.timeout(self._settings.probe_seconds):
                    await self._look_again.wait()
                await asyncio.sleep(self._settings.probe_seconds / 10)  # a dead one is not asked all the time
            except TimeoutError:
                pass

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(self._settings.health_seconds):
                ready = await self._get("/ready")
                closed = self._settings.open_replicas or (await self._get("/v1/models")).status == 401
        except ReplicaLost as error:
            self._change("starting" if self.state == "starting" else "lost", str(error))
        except TimeoutError:
            self._change("lost", f"it did not answer /ready within {self._settings.health_seconds:g} seconds")
            self.abandon()
        else:
            self._judge(ready, closed)

    def _judge(self, ready: Head, closed: bool) -> None:
        if not closed:
            self._change("refused", _OPEN)
        elif ready.status == 200 and ready.get(b"content-type").startswith(b"text/html"):
            self._change("refused", "it answers /ready with a web page: check its host and port")
        elif ready.status in (200, 404):  # other servers have no /ready
            self._change("ready", "it takes requests")
        else:
            self._change("draining", "it takes no new requests")

    async def _get(self, path: str) -> Head:
        """Status and headers of a GET on a connection of its own."""
        connection = await self.pool.take(fresh=True)
        try:
            head = f"GET {path} HTTP/1.1\r\nhost: {self.address.authority}\r\nconnection: close\r\n\r\n"
            return await connection.send(head.encode())
        finally:
            connection.abort()

    def _change(self, state: State, reason: str) -> None:
        if state == self.state:
            return
        log = logger.info if state == "ready" else logger.warning
        log("replica %d at %s is %s: %s", self.number, self.address.url, state, reason)
        self.epoch += state == "ready"
        self.losses += state == "lost"
        self.state = state


class Fleet:
    """All replicas. ``spread`` bounds the load of each, see `GatewaySettings`. Lives in one event loop."""

    def __init__(self, addresses: Sequence[Address], settings: GatewaySettings) -> None:
        self.replicas = [Replica(number, address, settings) for number, address in enumerate(addresses, start=1)]
        self._spread = settings.spread
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks = [asyncio.create_task(replica.watch(self._changed)) for replica in self.replicas]

    def report_loss(self, place: int, reason: str) -> None:
        """Note a loss, from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.replicas[place].note_loss, reason)

    async def close(self) -> None:
        """End what is under way, and the watches."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self.replicas:
            replica.abandon()
            replica.pool.close()

    @property
    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.state == "ready"]

    def choose(self, key: bytes, tried: Tried) -> Replica | None:
        """The replica for a request, none of those that were ``tried``; None where none is ready.

        Requests of one ``key`` go to one replica, the first in an order that the key gives (rendezvous hashing), and to
        the next one while it has more than its share (consistent hashing with bounded loads, Mirrokni et al. 2018).
        Without a key the one with the fewest requests takes it.
        """
        free = [replica for replica in self.ready if (replica.number, replica.epoch) not in tried]
        if not free or not key:
            return min(free, key=lambda replica: (replica.in_flight, _rank(key, replica)), default=None)
        most = math.ceil(self._spread * (sum(replica.in_flight for replica in free) + 1) / len(free))
        ranked = sorted(free, key=lambda replica: _rank(key, replica))
        return next(replica for replica in ranked if replica.in_flight < most)

    async def wait(self, key: bytes, tried: Tried, seconds: float) -> Replica | None:
        """Wait until a replica is ready, for ``seconds`` at most; None where none became ready."""
        if (replica := self.choose(key, tried)) is not None or not seconds:
            return replica
        try:
            async with asyncio.timeout(seconds):
                while (replica := self.choose(key, tried)) is None:
                    self._changed.clear()
                    await self._changed.wait()
                return replica
        except TimeoutError:
            return None


def _rank(key: bytes, replica: Replica) -> bytes:
    """By the replica's number, so that a replica that comes back has the keys that it had."""
    return hashlib.blake2b(b"%d:%s" % (replica.number, key), digest_size=8).digest()
