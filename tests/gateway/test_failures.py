"""Whatever a replica does, a client gets the text that one server alone would have given, or one error in time."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from parlay.gateway.app import Gateway
from parlay.gateway.delivered import is_last
from parlay.gateway.replicas import Replica
from tests.gateway.conftest import READY, Fake, Line, relay

TEXT: dict[str, Any] = {"model": "parlay-mini", "prompt": "The sea is", "max_tokens": 24, "ignore_eos": True}
CHAT: dict[str, Any] = {
    "model": "parlay-mini",
    "messages": [{"role": "user", "content": "Tell me about the sea."}],
    "max_tokens": 24,
    "ignore_eos": True,
}
QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", {**TEXT, "temperature": 0}),
    "sampled": ("/v1/completions", {**TEXT, "seed": 11, "n": 2, "logprobs": 1}),
    "chat": ("/v1/chat/completions", {**CHAT, "seed": 12, "stream_options": {"include_usage": True}}),
}
Behind = Callable[..., None]


def read(answer: httpx.Response) -> dict[Any, Any]:
    """What a client makes of a stream that ended well."""
    assert answer.status_code == 200, answer.text
    blocks = [block for block in answer.text.split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks), answer.text
    assert blocks.pop() == "data: [DONE]"
    found: dict[Any, Any] = defaultdict(str)
    names = set()
    for chunk in (json.loads(block.removeprefix("data: ")) for block in blocks):
        names.add((chunk["id"], chunk["created"]))
        found["usage"] = (chunk.get("usage") or {}).get("total_tokens", "")
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            found[choice["index"]] += choice.get("text", "") + (delta.get("content") or "")
            found[choice["index"], "role"] += delta.get("role", "")
            found[choice["index"], "end"] += choice["finish_reason"] or ""
            found[choice["index"], "logprobs"] += "".join((choice["logprobs"] or {}).get("tokens", []))
    assert len(names) == 1
    return found


async def whole(client: httpx.AsyncClient, question: str) -> dict[Any, Any]:
    path, fields = QUESTIONS[question]
    return read(await client.post(path, json={**fields, "stream": True}))


OTHERS: dict[str, tuple[dict[str, Any], Callable[[Any], str]]] = {
    "/v1/messages": ({**CHAT}, lambda event: event.get("delta", {}).get("text", "")),
    "/v1/responses": (
        {"input": "Tell me about the sea.", "max_output_tokens": 24},
        lambda event: event.get("delta", ""),
    ),
    "/api/chat": ({"messages": CHAT["messages"]}, lambda event: event["message"]["content"]),
    "/api/generate": ({"prompt": "The sea is", "raw": True}, lambda event: event["response"]),
    "/completion": ({"prompt": "The sea is", "n_predict": 24}, lambda event: event["content"]),
}


@pytest.mark.parametrize("path", OTHERS)
def test_streams_of_every_protocol_outlive_their_replica(behind: Behind, server: int, path: str) -> None:
    fields, piece = OTHERS[path]
    seed = {"options": {"seed": 7, "num_predict": 24}} if path.startswith("/api") else {"seed": 7}
    lines = [Line(server), Line(server)]

    async def said(client: httpx.AsyncClient) -> str:
        answer = await client.post(path, json={"model": "parlay-mini", "stream": True, **fields, **seed})
        rows = [row.removeprefix("data: ") for row in answer.text.splitlines() if row and not row.startswith("event: ")]
        assert "error" not in json.loads(rows[-1]), rows[-1]
        end = b"\n" if path.startswith("/api") else b"\n\n"
        *events, last, rest = answer.content.split(end)
        assert is_last(last + end)
        assert not rest
        assert not any(is_last(event + end) for event in events)
        return "".join(piece(json.loads(row)) for row in rows)

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        expected = await said(client)
        assert len(expected) > 20
        next(line for line in lines if line.posts).most = 900
        assert await said(client) == expected
        assert sum(line.dead for line in lines) == 1
        assert "parlay_gateway_streams_broken_total 0.0" in (await client.get("/metrics")).text

    behind(lines, test)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_stream_outlives_its_replica_wherever_it_is_cut(behind: Behind, server: int, question: str) -> None:
    lines = [Line(server), Line(server)]

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        expected = await whole(client, question)
        home = next(line for line in lines if line.posts)
        resumed = 0
        for most in (60, 450, 700, 1100, 1600, 2600, 4000):
            home.most = most
            assert await whole(client, question) == expected
            resumed += home.dead
            home.most, home.dead = None, False
            while len(gateway.fleet.ready) < 2:
                await asyncio.sleep(0.01)
        assert resumed >= 6
        assert b"parlay_gateway_streams_broken_total 0.0" in (await client.get("/metrics")).content

    behind(lines, test)


def test_streams_go_on_when_each_replica_is_lost_in_turn(behind: Behind, server: int) -> None:
    lines = [Line(server) for _ in range(4)]

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        expected = await whole(client, "greedy")
        for line in lines[:]:
            line.most = 1500
        lines[-1].most = None
        assert await whole(client, "greedy") == expected

    behind(lines, test)


def test_sixteen_streams_lose_one_of_two_replicas_and_no_token(behind: Behind, server: int) -> None:
    lines = [Line(server), Line(server)]
    fields = [{**TEXT, "prompt": f"Number {number} is", "seed": number, "stream": True} for number in range(16)]

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        async def ask(body: dict[str, Any]) -> dict[Any, Any]:
            return read(await client.post("/v1/completions", json=body))

        expected = [await ask(body) for body in fields]
        lines[0].most = 2500
        assert await asyncio.gather(*map(ask, fields)) == expected
        assert lines[0].dead

    behind(lines, test)


def test_a_replica_that_hangs_is_left_within_the_time_for_its_health(behind: Behind, server: int) -> None:
    lines = [Line(server), Line(server)]

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        expected = await whole(client, "sampled")
        home = next(line for line in lines if line.posts)
        home.most, home.hangs = 1500, True
        assert await whole(client, "sampled") == expected
        assert gateway.fleet.replicas[lines.index(home)].state == "lost"

    behind(lines, test, health_seconds=1.0)


@pytest.mark.parametrize("most", [700, 2600])
def test_a_stopped_replica_is_noticed_in_time_and_says_nothing_twice_when_it_wakes(
    behind: Behind, server: int, most: int
) -> None:
    """SIGSTOP in the midst of a stream, and SIGCONT while the other replica goes on with it, which is given more time:
    the machine may be busy."""
    with relay(server, most) as stops, relay(server) as other:

        async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
            first, second = gateway.fleet.replicas
            second._settings = replace(second._settings, health_seconds=60.0)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server}") as direct:
                expected = await whole(direct, "sampled")
            second.in_flight += 5  # so the first one is chosen
            asked = asyncio.create_task(whole(client, "sampled"))
            while not stops.stopped:
                await asyncio.sleep(0.01)
            second.in_flight -= 5
            while first.state != "lost":  # long before any other limit of the gateway
                await asyncio.sleep(0.01)
            stops.wake()
            assert await asked == expected
            assert "parlay_gateway_streams_resumed_total 1.0" in (await client.get("/metrics")).text
            while first.state != "ready":
                await asyncio.sleep(0.01)
            for _ in range(2):
                assert await whole(client, "sampled") == expected

        behind([stops, other], test, health_seconds=1.5)


def test_a_replica_that_says_nothing_more_is_left_though_it_is_healthy(behind: Behind, server: int) -> None:
    slow = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n{"

    class Silent(Fake):
        async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            data = await reader.read(65536)
            writer.write(slow if data.startswith(b"POST") else READY)
            await writer.drain()
            if data.startswith(b"POST"):
                await asyncio.Event().wait()
            writer.close()

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        for _ in range(2):  # whichever is asked first
            answer = await client.post("/v1/completions", json={**TEXT, "seed": 1, "max_tokens": 2})
            assert answer.json()["choices"][0]["finish_reason"] == "length"

    behind([Silent(b""), Line(server)], test, silence_seconds=2.0)


def test_a_slow_replica_loses_no_request(behind: Behind, server: int) -> None:
    slow, quick = Line(server), Line(server)
    slow.pause = 0.02

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        async def ask(number: int) -> str:
            answer = await client.post("/v1/completions", json={**TEXT, "prompt": f"{number}", "max_tokens": 4})
            return str(answer.json()["choices"][0]["finish_reason"])

        queue = iter(range(24))

        async def worker() -> list[str]:
            return [await ask(number) for number in queue]

        answers = await asyncio.gather(*(worker() for _ in range(4)))
        assert {end for each in answers for end in each} == {"length"}
        assert slow.posts + quick.posts == 24

    behind([slow, quick], test)


@pytest.mark.parametrize("stream", [True, False])
def test_whole_requests_are_tried_again_elsewhere(behind: Behind, server: int, stream: bool) -> None:
    lines = [Line(server), Line(server)]

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        body = {**TEXT, "stream": stream}  # no seed: the gateway fixes one before the first try
        await client.post("/v1/completions", json=body)
        home = next(line for line in lines if line.posts)
        home.most = 30
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert home.dead

    behind(lines, test)


RUBBISH = {
    "no HTTP": b"SSH-2.0-OpenSSH_9.9\r\n",
    "endless head": b"HTTP/1.1 200 OK\r\n" + b"x-filler: " + b"a" * 70_000,
    "no JSON": b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 7\r\n\r\n<html/>",
    "half a body": b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{",
    "closes": b"",
}
STREAMED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nparlay-resume: %s\r\nconnection: close\r\n\r\n"
RUBBISH_STREAMS = {
    **{name: answer for name, answer in RUBBISH.items() if name != "no JSON"},
    "no names": STREAMED % b"abc" + b": opened\n\n",
    "no comments": STREAMED % b"abc id 1" + b': opened\n\ndata: {"id": 1}\n\n',
    "no event": STREAMED % b"abc id 1" + b": opened\n\n<html/>\n\n",
    "no ids": STREAMED % b"abc id 1" + b': opened\n\n: tokens 0 x\ndata: {"id":1}\n\n',
    "ends early": STREAMED % b"abc id 1" + b": opened\n\n",
}


@pytest.mark.parametrize("name", RUBBISH)
def test_a_replica_that_answers_rubbish_is_left(behind: Behind, server: int, name: str) -> None:
    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        for seed in range(3):
            answer = await client.post("/v1/completions", json={**TEXT, "max_tokens": 2, "seed": seed})
            assert answer.json()["choices"][0]["finish_reason"] == "length"

    behind([Fake(RUBBISH[name]), Line(server)], test)


@pytest.mark.parametrize("name", RUBBISH_STREAMS)
def test_no_rubbish_reaches_a_stream(behind: Behind, name: str) -> None:
    """Nothing was said yet that another replica could go on with, so the end is one error."""
    fakes = [Fake(RUBBISH_STREAMS[name]), Fake(RUBBISH_STREAMS[name])]

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        answer = await client.post("/v1/completions", json={**TEXT, "stream": True})
        if answer.status_code == 200:
            event = answer.text.removeprefix("data: ")
            assert "error" in json.loads(event), answer.text
        else:
            assert answer.json()["error"]["code"] in ("no_replica", "replica_lost")

    behind(fakes, test, wait_seconds=0.2, retries=2)


def test_other_weights_end_a_stream_with_one_error_event(behind: Behind, server: int) -> None:
    refusal = json.dumps(
        {"error": {"message": "other weights", "type": "invalid_request_error", "code": "not_resumable"}}
    )
    head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(refusal)}\r\n\r\n"
    line, other = Line(server), Fake((head + refusal).encode())

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        line.events = 2  # it says that it has begun, and the first part of a text
        gateway.fleet.replicas[1].in_flight += 5  # so the first one is chosen
        answer = await client.post("/v1/completions", json={**TEXT, "stream": True, "n": 2})
        *chunks, last = [block for block in answer.text.split("\n\n") if block]
        assert chunks
        assert "other weights" in json.loads(last.removeprefix("data: "))["error"]["message"]

    behind([line, other], test, wait_seconds=0.2)


@pytest.mark.parametrize("strategy", ["auto", "prompt-lookup:rule=typical"], ids=["resumable", "lossy"])
def test_a_cut_stream_of_a_response_ends_as_on_one_server(behind: Behind, server: int, strategy: str) -> None:
    """OpenAI's client raises for an event that has ``error``; its types want each event numbered."""
    line = Line(server)

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        line.events = 4
        fields, _ = OTHERS["/v1/responses"]
        body = {"model": "parlay-mini", "stream": True, "strategy": strategy, **fields}
        answer = await client.post("/v1/responses", json=body)
        events = [
            json.loads(row.removeprefix("data: ")) for row in answer.text.splitlines() if row.startswith("data: ")
        ]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert len(events) > 1
        assert events[-1]["type"] == "error"
        assert events[-1]["error"] == {field: events[-1][field] for field in ("message", "param", "code")} | {
            "type": "server_error"
        }

    behind([line], test, wait_seconds=0.2, retries=1)


def test_a_lossy_stream_ends_with_one_error_event(behind: Behind, server: int) -> None:
    lines = [Line(server), Line(server)]
    for line in lines:
        line.events = 1

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        body = {**TEXT, "stream": True, "n": 2, "strategy": "prompt-lookup:rule=typical"}
        answer = await client.post("/v1/completions", json=body)
        _, last, _ = answer.text.split("\n\n")
        message = json.loads(last.removeprefix("data: "))["error"]["message"]
        assert "can't be resumed: strategy prompt-lookup is of exactness lossy" in message

    behind(lines, test)


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/chat/completions", lambda body: body["error"]["message"]),
        ("/v1/messages", lambda body: body["error"]["message"]),
        ("/api/chat", lambda body: body["error"]),
    ],
)
def test_one_error_in_the_protocols_shape_when_all_are_down(
    behind: Behind, path: str, shape: Callable[[Any], str]
) -> None:
    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        for replica in gateway.fleet.replicas:
            replica.note_loss("it was taken away")
        answer = await client.post(path, json=CHAT)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "none of the 2 replicas takes requests now" in shape(answer.json())
        health = await client.get("/health")
        assert (health.status_code, health.json()["replicas"]) == (503, {"1": "lost", "2": "lost"})

    behind([Fake(b""), Fake(b"")], test, wait_seconds=0.1, probe_seconds=3000)  # a tenth of it before it looks again


def test_a_request_that_ends_every_replica_is_not_tried_for_ever(behind: Behind) -> None:
    fakes = [Fake(b"") for _ in range(2)]

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        answer = await client.post("/v1/completions", json=TEXT)
        assert answer.status_code in (502, 503)
        assert sum(len(fake.posts) for fake in fakes) <= 4

    behind(fakes, test, retries=3)


def test_a_pull_is_not_sent_twice(behind: Behind) -> None:
    fakes = [Fake(b""), Fake(b"")]

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        answer = await client.post("/api/pull", json={"model": "x"})
        assert answer.status_code == 502
        assert "whether it has done what was asked is not known" in answer.json()["error"]
        assert sum(len(fake.posts) for fake in fakes) == 1

    behind(fakes, test)


def test_the_best_error_of_a_replica_is_passed_on(behind: Behind) -> None:
    body = b'{"error":{"message":"the model can\'t be loaded","code":"model_load_failed"}}'
    head = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    fakes = [Fake(head % len(body) + body), Fake(head % len(body) + body)]

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        answer = await client.post("/v1/completions", json=TEXT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_load_failed")
        assert [len(fake.posts) for fake in fakes] == [1, 1]

    behind(fakes, test)


def test_an_answer_that_nobody_asked_for_reaches_nobody(behind: Behind) -> None:
    """A replica sends two answers to one request: the next client must not get the second."""
    own, other = (
        b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\ncontent-length: 3\r\n\r\n%b" % text for text in (b"own", b"not")
    )

    class Twice(Fake):
        async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65536):
                if not data.startswith(b"POST"):
                    writer.write(READY)
                    continue
                if at_once[0]:
                    writer.write(own + other)
                    continue
                writer.write(own)
                await read.wait()
                writer.write(other)
            writer.close()

    at_once, read = [True], asyncio.Event()

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        pool = gateway.fleet.replicas[0].pool
        for at_once[0] in (True, False):
            for _ in range(3):
                read.clear()
                assert (await client.post("/tokenize", json={"prompt": "x"})).content == b"own"
                read.set()
                while not all(connection.closed for connection in pool._idle):
                    await asyncio.sleep(0.01)

    behind([Twice(b"")], test)


@pytest.mark.parametrize("reset", [True, False])
def test_an_answer_without_a_length_is_whole_only_if_the_replica_ends_it(behind: Behind, reset: bool) -> None:
    """The first connection is reset amid the answer, or the gateway gives it up."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n"

    class Cut(Fake):
        async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = (await reader.read(65536)).startswith(b"POST")
            first = asked and not any(fake.posts for fake in fakes)
            self.posts += [b""] * asked
            writer.write((head + b"half" if first else head + b"half and half") if asked else READY)
            if first:
                (exchange,) = [each for replica in replicas for each in replica.exchanges]
                while exchange.heard == exchange._asked:
                    await asyncio.sleep(0.01)
                if not reset:
                    return exchange.expire("it was silent")
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.close()

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        replicas.extend(gateway.fleet.replicas)
        answer = await client.post("/tokenize", json={"prompt": "x"})
        assert answer.content == b"half and half"
        assert [len(fake.posts) for fake in fakes] == [1, 1]

    replicas: list[Replica] = []
    fakes = [Cut(b"") for _ in range(2)]
    behind(fakes, test)


LAST_EVENTS = {
    "/v1/completions": (b'data: {"choices":[]}\n\n', b"data: [DONE]\n\n"),
    "/v1/messages": (b"event: message_start\ndata: {}\n\n", b"event: message_stop\ndata: {}\n\n"),
    "/v1/responses": (b"event: response.created\ndata: {}\n\n", b"event: response.completed\ndata: {}\n\n"),
    "/api/chat": (b'{"done":false}\n', b'{"done":true}\n'),
    "/completion": (b'data: {"stop":false}\n\n', b'data: {"stop":true}\n\n'),
}


@pytest.mark.parametrize("path", LAST_EVENTS)
def test_a_stream_without_a_length_is_whole_only_with_its_last_event(behind: Behind, path: str) -> None:
    """As if a proxy that speaks HTTP/1.0 stood before the replicas, and the one behind it died."""
    event, last = LAST_EVENTS[path]
    kind = b"application/x-ndjson" if path.startswith("/api") else b"text/event-stream"
    head = b"HTTP/1.0 200 OK\r\ncontent-type: %b\r\n" % kind
    resumed = b"%bparlay-resume: print name 1\r\n\r\n: opened\n\n" % head
    space = b"\n" if path.startswith("/api") else b""
    cut, good = Fake(head + b"\r\n" + event[:-3]), Fake(head + b"\r\n" + event + last)

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        async def ask() -> bytes:
            while len(gateway.fleet.ready) < 2:
                await asyncio.sleep(0.01)
            return (await client.post(path, json={"stream": True})).content

        gateway.fleet.replicas[1].in_flight += 5  # so the first one is chosen
        assert await ask() == event + last  # the client had nothing yet
        cut._answer = head + b"\r\n" + event
        assert (await ask()).startswith(event)
        assert b"its stream broke off" in await ask()
        cut._answer = resumed + b": tokens 0 5\n" + event + space
        good._answer = resumed + b": done\n" + last + space
        assert await ask() == event + last
        assert b'"token_ids":[[5]]' in good.posts[-1]

    behind([cut, good], test)


def test_a_large_answer_is_not_copied_again_for_each_part(behind: Behind) -> None:
    body = b'{"a":"%b"}' % (b"x" * (24 << 20))
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        began = time.process_time()
        answer = await client.post("/v1/embeddings", json={"input": "x"})
        assert answer.content == body
        assert time.process_time() - began < 3

    behind([Fake(head + body)], test)


def test_a_gateway_without_files_blames_no_replica(
    behind: Behind, server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        (replica,) = gateway.fleet.replicas
        replica.pool.close()

        tries: list[object] = []

        async def full(*given: object, **named: object) -> None:
            tries.append(given)
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", full)
        answer = await client.post("/v1/completions", json=TEXT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert (await client.get("/replicas/1/metrics")).status_code == 503
        before = len(tries)
        while len(tries) < before + 3:  # it is looked after meanwhile
            await asyncio.sleep(0.01)
        assert (replica.state, replica.losses) == ("ready", 0)
        monkeypatch.undo()
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 200

    behind([Line(server)], test)


def test_a_gateway_that_was_stopped_itself_blames_no_replica(behind: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the time for a replica's health passes while it waits for an answer, which lies there unread then."""
    asked, passed = asyncio.Event(), [0.0]
    waits: list[asyncio.Event] = []

    class Waiting(Fake):
        async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if waits:
                asked.set()
                await waits[0].wait()
            await super().handle(reader, writer)

    def later(clock: Callable[[], float]) -> Callable[[], float]:
        return lambda: clock() + passed[0]

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        (replica,) = gateway.fleet.replicas
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", later(loop.time))
        monkeypatch.setattr("parlay.gateway.replicas.time", SimpleNamespace(monotonic=later(time.monotonic)))
        waits.append(asyncio.Event())
        await asked.wait()
        passed[0] = 40.0
        waits.pop().set()
        looks = fake.looks
        while fake.looks < looks + 2:
            await asyncio.sleep(0.01)
        assert (replica.state, replica.losses) == ("ready", 0)

    fake = Waiting(READY)
    behind([fake], test, health_seconds=20.0)
