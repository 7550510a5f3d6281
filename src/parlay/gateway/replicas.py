"""The replicas behind a gateway: checks their health, chooses one for each request, and tracks the requests on each."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from pydantic_core import from_json

from parlay.gateway.client import Connection, Head, NoFiles, Pool, ReplicaLost
from parlay.gateway.settings import Address, GatewaySettings, gateways_in

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "draining", "lost", "refused"]
_OPEN = (
    "it asks for no key, and other machines can reach this gateway: give the gateway or the replicas keys, or the "
    "gateway --no-auth"
)
_KEY_UNKNOWN = "it does not take this gateway's first key: start it and the gateway with the same --api-key-file FILE"
_HASHING_SECONDS = 600.0
"""Seconds allowed for a server to hash its weights when it is asked for its identity."""
LONG_START_SECONDS = 30.0
"""Seconds after which the log says that a replica has not answered since the gateway started."""
_LONG_START = "replica %d at %s has not answered for %g s (%s): if it is not still loading a model, check its address"
_OWN_DELAY = 0.5
"""The share of a health check's time limit by which the gateway itself may be late; beyond it, it was suspended."""
_BODY_BYTES = 64 * 1024
"""The most bytes read of a health check's body."""
LOOP = 508
"""The status with which a gateway answers a request that it has sent itself."""
COMES_BACK = "requests come back from it to this gateway: remove each --replica that leads back here"
_REFUSALS = {
    LOOP: COMES_BACK,
    401: "it asks for a key: give this gateway one that it takes, with --api-key-file FILE",
}
"""The reason why a replica is not used, by the status with which it answers a check."""
Tried = set[tuple[int, int]]
"""The replicas that a request has tried, by number and epoch."""


class Exchange:
    """One request on one replica: a context manager in which each failure is ReplicaLost, and recorded at the end."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._connection: Connection | None = None
        self._expired = ""
        self._asked = time.monotonic()
        self.read_all = False
        """Whether all of the reply that is wanted has been read."""

    def __enter__(self) -> Self:
        self._replica.in_flight += 1
        self._replica.exchanges.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._replica.in_flight -= 1
        self._replica.exchanges.discard(self)
        if self._connection is not None:
            self._replica.pool.give_back(self._connection, read=self.read_all)
        if isinstance(error, ReplicaLost):
            self._replica.note_loss(str(error))

    @property
    def heard(self) -> float:
        """The time at which the replica last sent bytes, or at which the request began."""
        return max(self._asked, self._connection.heard) if self._connection is not None else self._asked

    async def send(self, request: bytes) -> Head:
        """Send a whole request, and return the reply's head. Raises ReplicaLost if that fails.

        If the replica has closed an idle connection meanwhile, the request is sent on a new one.
        """
        connection = self._connection = self._replica.pool.kept()
        if connection is not None:
            try:
                return await connection.send(request)
            except ReplicaLost:
                if connection.heard or self._expired:
                    raise
        self._connection = await self._replica.pool.connect()
        if self._expired:
            raise ReplicaLost(self._expired)
        return await self._connection.send(request)

    def reply(self) -> Connection:
        """Return the connection, to read the reply's body from."""
        assert self._connection is not None
        return self._connection

    def expire(self, reason: str) -> None:
        """End the exchange; the task that waits for the reply gets ReplicaLost."""
        self._expired = reason
        if self._connection is not None:
            self._connection.fail(reason)


@dataclass(frozen=True, slots=True)
class Identity:
    """Hashes of everything that a replica's texts depend on, from `/identity`."""

    build: str
    models: str
    kernels: str

    def differs(self, other: Identity, *, mixed: bool) -> str:
        """Describe a difference from ``other`` that matters, and what to do about it; empty if there is none."""
        if self.models != other.models:
            return "other models or weights than replica {}: put a gateway of its own before it"
        if mixed or self == other:
            return ""
        what = "another build of Parlay" if self.build != other.build else "other kernels"
        return what + " than replica {}: --mixed allows it, and then streams can't go on from one to the other"


def read_identity(body: bytes) -> Identity:
    """Parse a replica's answer. Raises ValueError for anything else."""
    fields = from_json(body)
    match fields:
        case {"build": str(build), "models": str(models), "kernels": str(kernels)}:
            return Identity(build, models, kernels)
    raise ValueError("it lacks build, models or kernels")


class Replica:
    """A server behind the gateway. ``number`` counts from 1; ``epoch`` counts how often it became ready. Only one event
    loop calls its methods.

    ``others``: the list of all replicas of the gateway, this one included.
    """

    def __init__(self, number: int, address: Address, settings: GatewaySettings, others: Sequence[Replica]) -> None:
        self.number = number
        self.address = address
        self.pool = Pool(address, settings.connect_seconds)
        self.state: State = "starting"
        self.identity: Identity | None = None
        self.epoch = 0
        self.losses = 0
        self.in_flight = 0
        self.exchanges: set[Exchange] = set()
        """The requests under way."""
        self.loops = False
        """Whether requests come back from it to this gateway."""
        self.through: tuple[bytes, ...] = ()
        """If it is a gateway: its line of the header Via, and those of the gateways through which it reaches a
        server."""
        self._others = others
        self._settings = settings
        self._expected_by = time.monotonic() + LONG_START_SECONDS
        self._look_again = asyncio.Event()
        self._asked: asyncio.Task[tuple[Head, bytes]] | None = None
        """The task that is asking the replica for its identity, if any."""

    def note_loss(self, reason: str) -> None:
        """Send the replica no requests until a health check succeeds, and check it now."""
        if self.state == "ready":
            self._change("lost", reason)
        self._look_again.set()

    def renew(self) -> None:
        """Drop the connections to the replica's old process, and check the new one now."""
        self.pool.renew()
        self.epoch += self.state == "ready"
        self._look_again.set()

    def abandon(self, *, silent_for: float = 0.0, reason: str = "it does not answer") -> None:
        """End the replica's exchanges that have been silent for ``silent_for`` seconds."""
        now = time.monotonic()
        for exchange in [one for one in self.exchanges if now - one.heard >= silent_for]:
            exchange.expire(reason)

    async def watch(self, changed: asyncio.Event) -> None:
        """Check the replica's health until cancelled. ``changed`` is set after each check that finds it ready."""
        try:
            while True:
                await self._look()
                if self.state == "ready":
                    changed.set()
                seconds = self._settings.silence_seconds
                self.abandon(silent_for=seconds, reason=f"no byte came for {seconds:g} seconds")
                self.pool.close(unused=self._settings.health_seconds)
                self._look_again.clear()
                try:
                    async with asyncio.timeout(self._settings.probe_seconds):
                        await self._look_again.wait()
                    await asyncio.sleep(self._settings.probe_seconds / 10)  # a lost replica is not checked all the time
                except TimeoutError:
                    pass
        finally:
            self._ask_no_more()

    async def _look(self) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._settings.health_seconds):
                ready, _ = await self._get("/ready")
                objection = await self._objection()
            self.through = gateways_in(ready.get(b"via"))
            unknown = ready.status == 200 and self.state != "ready" and not self.address.socket
            if unknown and not await self._has_identified():
                return  # the replica is still hashing its weights, and keeps its state
            found = self._asked.result() if unknown and self._asked is not None else None
            self._asked = None
        except NoFiles:
            self._ask_no_more()  # nothing is known, so the replica keeps its state
        except ReplicaLost as error:
            self._ask_no_more()
            self._miss(str(error))
        except TimeoutError:
            self._ask_no_more()
            most = self._settings.health_seconds
            if time.monotonic() - began < (1 + _OWN_DELAY) * most:  # otherwise the answer may have come, unread
                self._miss(f"it did not answer within {most:g} seconds")
                self.abandon()
        else:
            refusal = self._refusal(ready, found) or objection
            if refusal:
                self._change("refused", refusal)
            elif ready.status == 200:
                self._change("ready", "it takes requests")
            else:
                self._change("draining", "it takes no new requests")

    async def _has_identified(self) -> bool:
        """Whether the replica has told its identity. If not, the question stays open while health checks go on."""
        self._asked = self._asked or asyncio.create_task(self._identify())
        done, _ = await asyncio.wait([self._asked], timeout=self._settings.health_seconds)
        return bool(done)

    def _ask_no_more(self) -> None:
        if self._asked is not None:
            self._asked.cancel()
        self._asked = None

    async def _identify(self) -> tuple[Head, bytes]:
        """Ask the replica for its identity. It may first hash its weights, a second per gigabyte. Raises
        ReplicaLost."""
        try:
            async with asyncio.timeout(_HASHING_SECONDS):
                answer, body = await self._get("/identity")
        except TimeoutError:
            raise ReplicaLost(f"it did not say within {_HASHING_SECONDS:g} seconds which weights it has") from None
        if answer.status == 503:
            raise ReplicaLost("its first model is not loaded")
        return answer, body

    async def _objection(self) -> str:
        """Return why the replica's API keys make it unusable; empty if they do not."""
        if self._settings.open_replicas and not self._settings.keys:
            return ""
        refuses = (await self._get("/load"))[0].status == 401
        if self._settings.keys:
            return _KEY_UNKNOWN if refuses else ""
        return "" if refuses else _OPEN

    def _refusal(self, ready: Head, found: tuple[Head, bytes] | None) -> str:
        """Return why the replica can't be used, in one line; empty if it can."""
        for status in (ready.status, found[0].status if found is not None else 0):
            if status in _REFUSALS:
                return _REFUSALS[status]
        if ready.status not in (200, 503):
            return f"it answers /ready with status {ready.status}: check its host and port"
        if found is None:
            return ""
        try:
            self.identity = read_identity(found[1])
        except ValueError:
            return "it does not say which Parlay it is (/identity): check its host and port, or update it"
        for other in self._others:
            if other is self or other.state != "ready" or other.identity is None:
                continue
            if difference := self.identity.differs(other.identity, mixed=self._settings.mixed):
                return "it has " + difference.format(other.number)
        return ""

    async def _get(self, path: str) -> tuple[Head, bytes]:
        """GET a path on a new connection; returns status, headers and the beginning of the body."""
        connection = await self.pool.connect()
        try:
            lines = [f"GET {path} HTTP/1.1", f"host: {self.address.authority}", "connection: close"]
            via = self._settings.via.of_check() if path == "/ready" else self._settings.via.own
            lines.append(f"via: {via.decode()}")
            lines += [f"authorization: Bearer {key}" for key in list(self._settings.keys)[:1]]
            answer, body = await connection.send("\r\n".join([*lines, "", ""]).encode()), b""
            while len(body) < _BODY_BYTES and (more := await connection.read()):
                body += more
            return answer, body
        finally:
            connection.abort()

    def _miss(self, reason: str) -> None:
        """Mark the replica as lost. If it was never ready, warn once, when its start has taken long."""
        if self.state != "starting":
            self._change("lost", reason)
        elif time.monotonic() > self._expected_by:
            self._expected_by = math.inf
            logger.warning(_LONG_START, self.number, self.address.url, LONG_START_SECONDS, reason)

    def _change(self, state: State, reason: str) -> None:
        if state == self.state:
            return
        log = logger.info if (self.state, state) == ("starting", "ready") else logger.warning
        log("replica %d at %s is %s: %s", self.number, self.address.url, state, reason)
        self.epoch += state == "ready"
        self.losses += state == "lost"
        self.state, self.loops = state, reason == COMES_BACK


class Fleet:
    """All replicas of a gateway. ``spread`` limits the load of each, see `GatewaySettings`. Only one event loop calls
    the methods."""

    def __init__(self, addresses: Sequence[Address], settings: GatewaySettings) -> None:
        self.replicas: list[Replica] = []
        for number, address in enumerate(addresses, start=1):
            self.replicas.append(Replica(number, address, settings, self.replicas))
        self._spread = settings.spread
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks = [asyncio.create_task(replica.watch(self._changed)) for replica in self.replicas]

    def report_loss(self, place: int, reason: str) -> None:
        """Note a replica's loss; any thread may call this."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.replicas[place].note_loss, reason)

    def report_new(self, place: int) -> None:
        """Note that a new process answers at a replica's address; any thread may call this."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.replicas[place].renew)

    async def close(self) -> None:
        """End all exchanges and health checks."""
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
        """Return the replica for a request, other than those ``tried``; None if none is ready.

        The key gives an order of the replicas (rendezvous hashing). The request goes to the first of them with less
        than its share of requests (consistent hashing with bounded loads, Mirrokni et al. 2018). Without a key the
        replica with the fewest requests is chosen.
        """
        free = [one for one in self.replicas if one.state == "ready" and (one.number, one.epoch) not in tried]
        if len(free) < 2:
            return free[0] if free else None
        if not key:
            return min(free, key=lambda replica: (replica.in_flight, _rank(key, replica)))
        most = math.ceil(self._spread * (sum(replica.in_flight for replica in free) + 1) / len(free))
        ranked = sorted(free, key=lambda replica: _rank(key, replica))
        return next(replica for replica in ranked if replica.in_flight < most)

    async def wait(self, key: bytes, tried: Tried, seconds: float) -> Replica | None:
        """Wait until a replica is ready, for at most ``seconds``; None if none became ready."""
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
    """Hash a key with the replica's number, so that a replica that returns gets its former keys."""
    return hashlib.blake2b(b"%d:%s" % (replica.number, key), digest_size=8).digest()
