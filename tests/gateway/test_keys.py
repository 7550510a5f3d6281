"""Who may ask a gateway that has API keys, and the key with which it asks its replicas."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from parlay.cli.gateway import add_arguments, settings
from parlay.gateway.app import Gateway
from parlay.gateway.settings import GatewaySettings
from parlay.serve.settings import KeyLimits
from tests.gateway.conftest import READY, Fake

Behind = Callable[..., None]
KEYS = {"one": KeyLimits(), "two": KeyLimits()}
BODY = {"prompt": "a"}
REFUSED = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\n\r\n{}"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class Locked(Fake):
    """A replica that answers nobody without one of its keys, neither a probe nor a request."""

    def __init__(self, *keys: str) -> None:
        super().__init__(READY)
        self._keys = [b"authorization: bearer " + key.encode() + b"\r\n" for key in keys]

    def answer_to(self, data: bytes) -> bytes:
        known = any(key in data.lower() for key in self._keys)
        return super().answer_to(data) if known else REFUSED


def settings_of(*words: str) -> GatewaySettings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return settings(parser.parse_args(words))


def test_flags_and_file_are_those_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("first requests=1\nsecond\n", encoding="utf-8")
    monkeypatch.setenv("PARLAY_API_KEY", "third")
    found = settings_of("--host", "0.0.0.0", "--api-key-file", str(file), "--api-key", "fourth")
    assert set(found.keys) == {"first", "second", "third", "fourth"}
    assert found.keys["first"].requests == 1
    assert (found.hosts, found.open_replicas) == ((), True)
    monkeypatch.delenv("PARLAY_API_KEY")
    assert settings_of("--host", "0.0.0.0").open_replicas is False


def test_an_error_in_a_key_names_where_the_key_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file with a wrong setting, and the variable that is set to nothing, as by a script that lacks the key."""
    file = tmp_path / "keys"
    file.write_text("first request=1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="keys: 'request=1' is not a setting of a key"):
        settings_of("--api-key-file", str(file))
    monkeypatch.setenv("PARLAY_API_KEY", "")
    with pytest.raises(ValueError, match="PARLAY_API_KEY is empty: set it to an API key, or unset it"):
        settings_of("--host", "0.0.0.0")


def test_nobody_without_a_key_reaches_a_replica(behind: Behind) -> None:
    """Not even one that asks for no key itself. Health is open, as at a server; the question of a browser, too."""
    fake = Fake(READY)

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        for headers in ({}, bearer("three"), {"x-api-key": "on"}):
            refused = await client.post("/v1/completions", json=BODY, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert (await client.get("/metrics", headers=headers)).status_code == 401
            assert (await client.get("/replicas/1/metrics", headers=headers)).status_code == 401
        assert not fake.posts
        for headers in (bearer("one"), {"x-api-key": "two"}):
            assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
        assert b"authorization: Bearer one\r\n" in fake.posts[0]
        assert (await client.get("/health")).status_code == 200
        asks = {"origin": "https://app.example", "access-control-request-method": "POST"}
        assert (await client.options("/v1/completions", headers=asks)).status_code == 200
        assert (await client.options("/v1/completions")).status_code == 401

    behind([fake], test, keys=KEYS)


def test_probes_carry_the_first_key(behind: Behind) -> None:
    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        answer = await client.post("/v1/completions", json=BODY, headers=bearer("two"))
        assert answer.status_code == 200

    behind([Locked("one", "two")], test, keys=KEYS)


@pytest.mark.parametrize("keys", [{}, {"other": KeyLimits()}])
def test_a_replica_that_refuses_probes_is_refused_with_the_remedy(
    behind: Behind, caplog: pytest.LogCaptureFixture, keys: dict[str, KeyLimits]
) -> None:
    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        while gateway.fleet.replicas[0].state == "starting":
            await asyncio.sleep(0.01)
        assert gateway.fleet.replicas[0].state == "refused"

    behind([Locked("one")], test, ready=0, keys=keys)
    assert "it asks for a key: give this gateway one that it takes, with --api-key-file" in caplog.text


def test_a_replica_whose_health_is_open_must_take_the_first_key(
    behind: Behind, caplog: pytest.LogCaptureFixture
) -> None:
    class Server(Locked):
        def answer_to(self, data: bytes) -> bytes:
            return super().answer_to(data) if b" /v1/" in data or b" /load " in data else READY

    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        while "refused" not in [replica.state for replica in gateway.fleet.replicas]:
            await asyncio.sleep(0.01)
        for _ in range(4):
            assert (await client.post("/v1/completions", json=BODY, headers=bearer("one"))).status_code == 200

    behind([Server("one"), Server("old")], test, ready=1, keys=KEYS)
    assert "start it and the gateway with the same --api-key-file" in caplog.text


def test_a_key_that_one_replica_does_not_know_is_tried_at_the_others(
    behind: Behind, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        for number in range(8):
            headers = {**bearer("two"), "x-session-id": f"{number}"}
            assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200

    behind([Locked("one"), Locked("one", "two")], test, keys=KEYS)
    assert (
        "replica 1 refuses an API key that this gateway accepts: start both with the same --api-key-file" in caplog.text
    )


def test_the_limits_of_a_key_hold_for_all_replicas_together(behind: Behind) -> None:
    async def test(client: httpx.AsyncClient, gateway: Gateway) -> None:
        gateway.limiter.quotas.enter(next(iter(gateway.limiter.quotas.own)))
        assert (await client.post("/v1/completions", json=BODY, headers=bearer("one"))).status_code == 429
        assert (await client.post("/v1/completions", json=BODY, headers=bearer("two"))).status_code == 200

    behind([Fake(READY)], test, keys={"one": KeyLimits(requests=1), "two": KeyLimits()})
