"""Where requests go, what they carry, and who may send them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from parlay.gateway.app import Gateway, create_gateway
from parlay.gateway.question import RESUMABLE, Question, read_question
from parlay.gateway.replicas import Fleet
from parlay.gateway.settings import Address, GatewaySettings, read_address
from tests.gateway.conftest import IDENTITY, READY, Fake, Line

Behind = Callable[..., None]


def fleet(count: int) -> Fleet:
    made = Fleet([Address("127.0.0.1", 8000 + number) for number in range(count)], GatewaySettings())
    for replica in made.replicas:
        replica.state = "ready"
    return made


def test_a_key_has_one_home_until_that_has_more_than_its_share() -> None:
    replicas = fleet(4)
    homes = Counter(replicas.choose(b"%d" % key, set()) for key in range(400))
    assert len(homes) == 4
    assert min(homes.values()) > 60
    home = replicas.choose(b"key", set())
    assert home is not None
    for _ in range(3):
        assert replicas.choose(b"key", set()) is home
    home.in_flight = 4
    assert (other := replicas.choose(b"key", set())) is not home
    assert other is not None


def test_keys_keep_their_homes_when_another_replica_leaves() -> None:
    replicas = fleet(4)
    before = {key: replicas.choose(b"%d" % key, set()) for key in range(100)}
    replicas.replicas[0].state = "lost"
    for key, home in before.items():
        if home is not replicas.replicas[0]:
            assert replicas.choose(b"%d" % key, set()) is home


def test_without_a_key_the_least_loaded_takes_a_request() -> None:
    replicas = fleet(3)
    for replica, load in zip(replicas.replicas, (2, 0, 1), strict=True):
        replica.in_flight = load
    assert replicas.choose(b"", set()) is replicas.replicas[1]


def question(body: Any, path: str = "/v1/chat/completions", **headers: str) -> Question:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"method": "POST", "path": path, "query_string": b"", "headers": named}
    return asyncio.run(read_question(scope, json.dumps(body).encode()))


def test_a_conversation_keeps_its_key_as_it_grows() -> None:
    first = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    later = [*first, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "And?"}]
    other = [first[0], {"role": "user", "content": "Good day"}]
    keys = [question({"messages": messages}).key for messages in (first, later, other)]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    "body", [{"prompt": "a" * 9000}, {"prompt": ["a", "b"]}, {"prompt": [1, 2]}, {"prompt": [[1], [2]]}, {"input": "a"}]
)
def test_every_form_of_prompt_has_a_key(body: dict[str, Any]) -> None:
    assert 5 < len(question(body, "/v1/completions").key) < 10_000


def test_a_session_goes_before_the_prompt() -> None:
    one, two = (question({"prompt": text}, x_session_id="s").key for text in ("a", "b"))
    assert one == two == b"session:s"
    assert question({"prompt": "a", "prompt_cache_key": "k"}).key == b"named:k"


@pytest.mark.parametrize("body", [{"prompt": "a"}, {"prompt": "a", "seed": None}])
def test_the_seed_is_fixed_before_the_first_try(body: dict[str, Any]) -> None:
    asked = question({**body, "stream": True}, "/v1/completions")
    sent = json.loads(asked.with_fields(resume={}))
    assert sent == {"prompt": "a", "stream": True, "seed": sent["seed"], "resume": {}}
    assert 0 <= sent["seed"] < 2**53
    assert question({"prompt": "a", "seed": 3}, "/v1/completions").body == b'{"prompt": "a", "seed": 3}'


@pytest.mark.parametrize(("path", "within"), RESUMABLE.items())
def test_every_api_gets_seeds_of_as_many_bits_as_a_client_can_send_back(path: str, within: str) -> None:
    """JavaScript holds integers of 53 bits exactly."""
    bodies = [json.loads(question({"prompt": "a"}, path).body) for _ in range(8)]
    seeds = [(body[within] if within else body)["seed"] for body in bodies]
    assert 2**40 < max(seeds) < 2**53


@pytest.mark.parametrize("prompt", [["a", "a"], [[1], [1]]])
def test_several_prompts_get_no_common_seed(prompt: Any) -> None:
    asked = question({"prompt": prompt, "stream": True}, "/v1/completions")
    assert "seed" not in json.loads(asked.body)
    assert 0 <= asked.resume["seed"] < 2**53
    for one in (["a"], [1, 2]):
        assert "seed" in json.loads(question({"prompt": one, "stream": True}, "/v1/completions").body)


def test_the_seed_that_asks_for_none_is_replaced_where_it_does_so() -> None:
    assert json.loads(question({"prompt": "a", "seed": -1}, "/completion").body)["seed"] >= 0
    for none in (-1, -7):  # a replica draws where a seed is below 0, so another would go on with another text
        asked = question({"prompt": "a", "options": {"seed": none}}, "/api/generate")
        assert json.loads(asked.body)["options"]["seed"] >= 0
    for path in ("/v1/completions", "/v1/messages"):
        assert json.loads(question({"prompt": "a", "seed": -1}, path).body)["seed"] == -1


def test_what_is_no_json_object_is_passed_on_as_it_is() -> None:
    for body in (b"", b"{", b"[1]", b'"x"', b"\xff"):
        scope = {"method": "POST", "path": "/v1/completions", "query_string": b"a=1", "headers": []}
        asked = asyncio.run(read_question(scope, body))
        assert asked.message("h:1").endswith(b"content-length: %d\r\n\r\n%s" % (len(body), body))
        assert asked.message("h:1").startswith(b"POST /v1/completions?a=1 HTTP/1.1\r\nhost: h:1\r\n")


def test_keys_and_other_headers_pass_through_and_hop_headers_do_not(behind: Behind) -> None:
    own = b"x-own: 1\r\nkeep-alive: 5\r\nconnection: X-Hop\r\nx-hop: 1\r\ncontent-type"
    fake = Fake(READY.replace(b"content-type", own))

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        headers = {"authorization": "Bearer k", "x-request-id": "r", "te": "trailers", "connection": "close, X-Private"}
        headers["x-private"] = "1"
        answer = await client.post("/v1/chat/completions?x=1", json={"messages": []}, headers=headers)
        assert (answer.headers["x-own"], answer.headers["parlay-replica"]) == ("1", "1")
        assert not {"keep-alive", "x-hop"} & answer.headers.keys()
        assert answer.headers["x-request-id"] == "r"
        sent = fake.posts[0].decode().lower()
        assert "authorization: bearer k\r\n" in sent
        assert "x-request-id: r\r\n" in sent
        assert not any(f"\n{name}:" in sent for name in ("te", "connection", "x-private", "transfer-encoding"))
        answer = await client.post("/v1/chat/completions", json={"messages": []})
        assert f"x-request-id: {answer.headers['x-request-id']}\r\n" in fake.posts[1].decode().lower()

    behind([fake], test)


def test_a_body_beyond_the_limit_reaches_no_replica(behind: Behind) -> None:
    fake = Fake(READY)

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        answer = await client.post("/v1/completions", content=b" " * 2000)
        assert (answer.status_code, fake.posts) == (413, [])

    behind([fake], test, max_body_bytes=1000)


def test_other_apis_pages_and_unknown_paths_are_the_replicas(behind: Behind, server: int) -> None:
    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "parlay-mini"
        assert (await client.get("/nowhere")).status_code == 404
        assert (await client.head("/version")).status_code == 200
        assert "text/html" in (await client.get("/")).headers["content-type"]
        said = {"model": "parlay-mini", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
        assert (await client.post("/v1/messages", json=said)).json()["usage"]["output_tokens"] in range(1, 5)
        short = {"model": "parlay-mini", "messages": said["messages"], "options": {"num_predict": 4}}
        lines = (await client.post("/api/chat", json=short)).text.splitlines()
        assert json.loads(lines[-1])["done"] is True
        events = (await client.post("/v1/messages", json={**said, "stream": True})).text
        assert "event: message_stop" in events

    behind([Line(server)], test)


def test_requests_share_a_connection_to_their_replica(behind: Behind, server: int) -> None:
    line = Line(server)

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        for stream in (False, True, True, False):
            body = {"model": "parlay-mini", "prompt": "The sea is", "max_tokens": 2, "stream": stream}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            while not gateway.fleet.replicas[0].pool._idle:  # a stream's last byte may come after the client has all
                await asyncio.sleep(0.01)
        assert line.posts == 4
        assert line.posting < 3

    behind([line], test)


def test_metrics_name_replicas_by_number(behind: Behind) -> None:
    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        await client.post("/v1/completions", json={"prompt": "a"})
        text = (await client.get("/metrics")).text
        assert 'parlay_gateway_replica_ready{replica="1"} 1.0' in text
        assert 'parlay_gateway_answers_total{status="2xx"} 1.0' in text
        assert (await client.get("/replicas/1/metrics")).text == IDENTITY.decode()
        assert (await client.get("/replicas/2/metrics")).status_code == 404
        assert "127.0.0.1" not in text + (await client.get("/health")).text

    behind([Fake(READY)], test)


def test_a_draining_replica_gets_nothing_new(behind: Behind) -> None:
    busy = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\n{}"
    draining, ready = Fake(READY, busy), Fake(READY)

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        while gateway.fleet.replicas[0].state == "starting":
            await asyncio.sleep(0.01)
        for number in range(8):
            await client.post("/v1/completions", json={"prompt": f"{number}"})
        assert (len(draining.posts), len(ready.posts)) == (0, 8)
        assert gateway.fleet.replicas[0].state == "draining"

    behind([draining, ready], test, ready=1)


def test_replicas_without_keys_are_not_opened_to_other_machines(behind: Behind) -> None:
    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        while gateway.fleet.replicas[0].state == "starting":
            await asyncio.sleep(0.01)
        assert gateway.fleet.replicas[0].state == "refused"
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 503

    behind([Fake(READY)], test, ready=0, open_replicas=False, wait_seconds=0.1)


def ready_as(identity: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(identity), identity)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ready_as(b"<html></html>"), "it does not say which Parlay it is"),
        (ready_as(b"{}"), "it does not say which Parlay it is"),
        (ready_as(b'{"version":"0.32"}'), "check its host and port"),
        (ready_as(b"", b"404 Not Found"), "it answers /ready with status 404"),
        (ready_as(IDENTITY.replace(b'"m"', b'"n"')), "it has other models or weights than replica"),
        (ready_as(IDENTITY.replace(b'"b"', b'"c"')), "it has another build of Parlay than replica"),
        (ready_as(IDENTITY.replace(b'"k"', b'"l"')), "it has other kernels than replica"),
    ],
)
def test_a_server_that_is_no_equal_replica_is_refused(
    behind: Behind, caplog: pytest.LogCaptureFixture, answer: bytes, words: str
) -> None:
    fakes = [Fake(READY), Fake(READY, answer)]

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        while "refused" not in [replica.state for replica in gateway.fleet.replicas]:  # of two, the later one
            await asyncio.sleep(0.01)
        for number in range(4):
            assert (await client.post("/v1/completions", json={"prompt": f"{number}"})).status_code == 200
        assert 0 in [len(fake.posts) for fake in fakes]

    behind(fakes, test, ready=1)
    assert words in caplog.text


def test_a_server_that_hashes_its_weights_for_long_is_looked_after_meanwhile(behind: Behind) -> None:
    """It is no lost one, gets no requests, and is taken as soon as it has said who it is."""
    fakes = [Fake(READY), Fake(READY)]
    fakes[1].hashed.clear()

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        while fakes[1].looks < 3:
            await asyncio.sleep(0.01)
        assert gateway.fleet.replicas[1].state == "starting"
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        assert not fakes[1].posts
        fakes[1].hashed.set()
        while gateway.fleet.replicas[1].state != "ready":
            await asyncio.sleep(0.01)

    behind(fakes, test, ready=1, health_seconds=0.5, probe_seconds=0.05)


def test_the_log_tells_that_a_replica_is_lost_or_back_and_not_that_it_starts(
    behind: Behind, caplog: pytest.LogCaptureFixture
) -> None:
    fake = Fake(READY)
    fake.awake.clear()

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        replica = gateway.fleet.replicas[0]
        while fake.looks < 2:
            await asyncio.sleep(0.01)
        assert (replica.state, replica.losses) == ("starting", 0)
        for state in ("ready", "lost", "ready"):
            (fake.awake.set if state == "ready" else fake.awake.clear)()
            while replica.state != state:
                await asyncio.sleep(0.01)

    behind([fake], test, ready=0, health_seconds=0.5)
    words = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [word for line in words for word in ("is lost", "is ready") if word in line] == ["is lost", "is ready"]


def test_the_log_tells_once_that_a_replica_takes_long_to_start(
    behind: Behind, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its address may be wrong."""
    monkeypatch.setattr("parlay.gateway.replicas.LONG_START_SECONDS", 0.1)
    fake = Fake(READY)
    fake.awake.clear()

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        while fake.looks < 5:
            await asyncio.sleep(0.01)

    behind([fake], test, ready=0, health_seconds=0.1, probe_seconds=0.05)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 1
    assert warned[0].startswith("replica 1 at http://127.0.0.1:")
    assert "has not answered for 0.1 s" in warned[0]
    assert warned[0].endswith("check its address")


def test_other_builds_may_be_mixed_and_other_weights_may_not(behind: Behind) -> None:
    fakes = [Fake(READY), Fake(READY, ready_as(IDENTITY.replace(b'"b"', b'"c"')))]

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        assert [replica.state for replica in gateway.fleet.replicas] == ["ready", "ready"]

    behind(fakes, test, mixed=True)


def test_no_web_page_reaches_it_under_another_name(behind: Behind) -> None:
    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        answer = await client.get("/v1/models", headers={"host": "evil.example"})
        assert answer.status_code == 403

    behind([Fake(READY)], test, hosts=("gateway",))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://h", "http://", "http://h:x", "http://h/v1", "http://u@h", ""])
def test_what_is_no_address_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="give the address of a server"):
        read_address(url)


def test_addresses() -> None:
    assert read_address("http://[::1]:81/").authority == "[::1]:81"
    assert read_address("https://host").url == "https://host:443"
    with pytest.raises(ValueError, match="1 to 256 times"):
        create_gateway([])
    with pytest.raises(ValueError, match="twice"):
        create_gateway([Address("h"), Address("h")])
