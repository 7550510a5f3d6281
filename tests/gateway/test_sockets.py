"""A gateway behind real sockets, where parts of a stream are written without a turn of the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from parlay.gateway.app import Gateway
from parlay.gateway.replicas import COMES_BACK
from parlay.serve.guard.connection import Connection
from tests.gateway.conftest import READY, Fake, Line, standing
from tests.gateway.test_failures import TEXT, Behind, whole


@asynccontextmanager
async def listening(gateway: Gateway) -> AsyncIterator[tuple[str, int]]:
    """Where the gateway listens, with the connections that `parlay gateway` has."""
    config = uvicorn.Config(gateway, http=Connection, lifespan="off")
    config.load()

    def accept() -> Connection:
        return Connection(config=config, server_state=ServerState(), app_state={})

    server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()
    server.close()


def test_a_stream_over_sockets_outlives_its_replicas(behind: Behind, server: int) -> None:
    lines = [Line(server), Line(server)]

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        expected = await whole(client, "sampled")
        async with listening(gateway) as (host, port), httpx.AsyncClient(base_url=f"http://{host}:{port}") as through:
            assert await whole(through, "sampled") == expected
            home = next(line for line in lines if line.posts)
            for most in (60, 700, 1600, 2600, 4000):
                home.most = most
                assert await whole(through, "sampled") == expected
                home.most, home.dead = None, False
                while len(gateway.fleet.ready) < 2:
                    await asyncio.sleep(0.01)
        assert b"parlay_gateway_streams_broken_total 0.0" in (await client.get("/metrics")).content

    behind(lines, test)


def test_a_client_that_reads_late_gets_everything_in_order(behind: Behind) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nparlay-resume: a cmpl-1 1\r\n\r\n: opened\n\n"
    events = [b"data: %d %b\n\n" % (number, b"x" * 4000) for number in range(2000)]

    class Full(Fake):
        async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not (await reader.read(65536)).startswith(b"POST"):
                writer.write(READY)
                return writer.close()
            writer.write(head)
            for number, event in enumerate(events):
                writer.write(b": tokens 0 %d\n%b" % (number, event))
                await writer.drain()
            writer.write(b": done\ndata: [DONE]\n\n")
            writer.close()

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        async with listening(gateway) as address:
            reader, writer = await asyncio.open_connection(*address)
            body = json.dumps({**TEXT, "stream": True}).encode()
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            await asyncio.sleep(0.3)
            await reader.readuntil(b"\r\n\r\n")
            found = []
            while size := int(await reader.readline(), 16):
                found.append((await reader.readexactly(size + 2))[:-2])
            writer.close()
            assert b"".join(found) == b"".join(events) + b"data: [DONE]\n\n"

    behind([Full(b"")], test)


def test_a_client_that_leaves_ends_its_request_at_the_replica(behind: Behind) -> None:
    class Silent(Fake):
        async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if (await reader.read(65536)).startswith(b"POST"):
                await reader.read()  # until the gateway closes it
            else:
                writer.write(READY)
            writer.close()

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        (replica,) = gateway.fleet.replicas
        async with listening(gateway) as address:
            for _ in range(2):
                _, writer = await asyncio.open_connection(*address)
                writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n\r\n{"prompt":"a"}')
                while not replica.in_flight:
                    await asyncio.sleep(0.01)
                writer.close()
                while replica.in_flight or gateway.limiter.active:
                    await asyncio.sleep(0.01)
        assert replica.state == "ready"

    behind([Silent(b"")], test)


def test_a_gateway_that_is_its_own_replica_does_not_use_itself(
    behind: Behind, caplog: pytest.LogCaptureFixture
) -> None:
    """It would call itself ready, and a request would go round until no other is let in."""
    good, itself = Fake(READY), Line(0)

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        async with listening(gateway) as (_, itself.to):
            while gateway.fleet.replicas[1].state != "refused":
                await asyncio.sleep(0.01)
            for number in range(4):
                assert (await client.post("/v1/completions", json={"prompt": f"{number}"})).status_code == 200
            assert len(good.posts) == 4

    behind([good, itself], test, ready=1)
    assert COMES_BACK in caplog.text


@asynccontextmanager
async def in_a_ring(count: int) -> AsyncIterator[list[tuple[httpx.AsyncClient, Gateway]]]:
    """Gateways of which each has the next one as its only replica, and the last one the first."""
    lines = [Line(0) for _ in range(count)]
    async with AsyncExitStack() as stack:
        pairs = [await stack.enter_async_context(standing([line], ready=0, wait_seconds=0)) for line in lines]
        for line, (_, gateway) in zip(lines, pairs[1:] + pairs[:1], strict=True):
            _, line.to = await stack.enter_async_context(listening(gateway))
        yield pairs


@pytest.mark.parametrize("count", [2, 3])
def test_gateways_in_a_ring_say_so(count: int, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with in_a_ring(count) as pairs:
            while not all(gateway.fleet.replicas[0].loops for _, gateway in pairs):
                await asyncio.sleep(0.01)
            for client, gateway in pairs:
                answer = await client.post("/v1/completions", json=TEXT)
                assert answer.status_code == 503
                assert f"(replica 1 can't be used: {COMES_BACK})" in answer.json()["error"]["message"]
                for _ in range(2):
                    await gateway.fleet.replicas[0]._look()

    asyncio.run(test())
    assert caplog.text.count(COMES_BACK) == count


def test_two_gateways_that_have_each_other_say_when_all_other_replicas_are_lost(server: int) -> None:
    """Each would stay ready because the other one is, and every request would come back."""
    own, ring = [Line(server), Line(server)], [Line(0), Line(0)]

    async def told(pairs: list[tuple[httpx.AsyncClient, Gateway]], ready: list[int]) -> None:
        for (client, gateway), count in zip(pairs, ready, strict=True):
            while len(gateway.fleet.ready) != count:
                await asyncio.sleep(0.01)
            assert (await client.get("/ready")).status_code == (200 if count else 503)
            answer = await client.post("/v1/completions", json=TEXT)
            assert answer.status_code == (200 if count else 503)
            if not count:
                assert f"(replica 2 can't be used: {COMES_BACK})" in answer.json()["error"]["message"]

    async def test() -> None:
        async with AsyncExitStack() as stack:
            each = [standing(list(two), ready=1, wait_seconds=0) for two in zip(own, ring, strict=True)]
            pairs = [await stack.enter_async_context(one) for one in each]
            for line, (_, gateway) in zip(ring, pairs[::-1], strict=True):
                _, line.to = await stack.enter_async_context(listening(gateway))
            await told(pairs, [2, 2])
            own[0].dead = True
            await told(pairs, [1, 1])
            own[1].dead = True
            await told(pairs, [0, 0])
            own[0].dead = False
            await told(pairs, [1, 1])

    asyncio.run(test())


@pytest.mark.parametrize("links", [{0: [1], 1: [2], 2: [0]}, {0: [1, 2], 1: [2, 0], 2: [0, 1]}], ids=["ring", "mesh"])
def test_three_gateways_say_when_all_other_replicas_are_lost(server: int, links: dict[int, list[int]]) -> None:
    """Each would stay ready because the next one is, and a request would go round them."""
    own = {each: Line(server) for each in links}
    others = {(each, other): Line(0) for each in links for other in links[each]}

    async def told(pairs: list[tuple[httpx.AsyncClient, Gateway]], status: int) -> None:
        for client, _ in pairs:
            while (await client.get("/ready")).status_code != status:
                await asyncio.sleep(0.01)
        for client, _ in pairs:
            answer = await client.post("/v1/completions", json=TEXT)
            assert answer.status_code == status
            if status == 503:
                assert f"(replica 2 can't be used: {COMES_BACK})" in answer.json()["error"]["message"]

    async def test() -> None:
        async with AsyncExitStack() as stack:
            lines = {each: [own[each], *(others[each, other] for other in links[each])] for each in links}
            pairs = [await stack.enter_async_context(standing(lines[one], ready=1, wait_seconds=0)) for one in links]
            for (_, other), line in others.items():
                _, line.to = await stack.enter_async_context(listening(pairs[other][1]))
            await told(pairs, 200)
            own[0].dead = own[1].dead = True
            await told(pairs, 200)
            own[2].dead = True
            await told(pairs, 503)
            own[1].dead = False
            await told(pairs, 200)

    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_request_that_comes_back_names_the_replica(caplog: pytest.LogCaptureFixture) -> None:
    """As where two gateways call each other ready, and have lost their other replicas."""

    async def test() -> None:
        async with in_a_ring(2) as pairs:
            for _, gateway in pairs:
                gateway.fleet._tasks[0].cancel()  # no further check corrects it
                gateway.fleet.replicas[0]._change("ready", "it takes requests")
            for _ in range(2):
                answer = await pairs[0][0].post("/v1/completions", json=TEXT)
                assert answer.status_code == 508
                assert answer.json()["error"]["message"] == f"replica 1 can't be used: {COMES_BACK}"
            assert caplog.text.count(f"replica 1 at {pairs[0][1].fleet.replicas[0].address.url}: {COMES_BACK}") == 1

    asyncio.run(test())


def test_a_request_that_comes_back_to_its_gateway_goes_to_another_replica(behind: Behind) -> None:
    """As where two gateways have each other as a replica."""

    class Around(Fake):
        to = 0

        async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            data, answer = await reader.read(65536), READY
            if data.startswith(b"POST"):
                self.posts.append(data)
                there, back = await asyncio.open_connection("127.0.0.1", self.to)
                back.write(data)
                answer = await there.read(65536)
                back.close()
            writer.write(answer)
            writer.close()

    good, around = Fake(READY), Around(b"")

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        async with listening(gateway) as (_, around.to):
            gateway.fleet.replicas[0].in_flight += 5  # so the other one is chosen
            assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
            assert (len(good.posts), len(around.posts)) == (1, 1)

    behind([good, around], test)
