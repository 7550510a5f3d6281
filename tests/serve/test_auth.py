"""Who gets in: keys, host names, other sites; and whose cached prefixes a request may meet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.testclient import TestClient

from parlay import LLM
from parlay.aio import AsyncLLM
from parlay.llm.router_file import entries, place
from parlay.serve.app import create_app
from parlay.serve.finished import Finished
from parlay.serve.guard.auth import digest, tenant
from parlay.serve.middleware import OPEN
from parlay.serve.settings import Settings

MakeApp = Callable[..., FastAPI]
KEYS = ("sesame", "sk-2nd_key")
GUARDED = (
    "/v1/models",
    "/v1/models/parlay-mini",
    "/metrics",
    "/strategies",
    "/choices",
    "/tokenize",
    "/nothing",
    "/healthy",
)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def locked(make_app: MakeApp) -> TestClient:
    return TestClient(make_app(keys=KEYS))


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens_the_door(locked: TestClient, key: str) -> None:
    assert locked.get("/v1/models", headers=bearer(key)).status_code == 200
    assert locked.post("/tokenize", json={"prompt": "x"}, headers=bearer(key)).status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Bearer sesam",
        "Bearer sesame2",
        "Basic sesame",
        "sesame",
        "Bearer SESAME",
        "Bearer sesame,sk-2nd_key",
        "Bearer s\xe9same",
    ],
)
def test_nothing_else_does(locked: TestClient, header: str) -> None:
    headers = {"Authorization": header.encode("latin-1")} if header else {}
    for address in GUARDED:
        response = locked.get(address, headers=headers)
        assert (response.status_code, response.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert "sesame" not in response.text


def test_no_byte_of_a_body_is_read_before_the_key(locked: TestClient) -> None:
    assert locked.post("/tokenize", content=b"{", headers={"Content-Type": "application/json"}).status_code == 401


def test_health_and_page_are_open(locked: TestClient) -> None:
    for address in (*OPEN, "/page/app.js"):
        assert locked.get(address).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "GET", "HEAD"])
@pytest.mark.parametrize("in_chunks", [False, True], ids=["whole", "in chunks"])
def test_what_is_open_takes_no_body_without_a_key(locked: TestClient, method: str, in_chunks: bool) -> None:
    """It would hold the memory, and a POST the place, of those who have keys."""
    for address in ("/health", "/page/app.js"):
        body = iter([b"x"]) if in_chunks else b"x"  # an iterator serves one request
        assert locked.request(method, address, content=body).status_code == 401
    assert locked.get("/health", headers={"Content-Length": "0"}).status_code == 200


def test_nobody_without_a_key_takes_a_place(make_app: MakeApp) -> None:
    app = make_app(keys=KEYS, concurrency=1, body_timeout=30)

    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            held = asyncio.create_task(client.post("/health", content=never()))
            await asyncio.sleep(0.05)
            answer = await client.post("/tokenize", json={"prompt": "x"}, headers=bearer("sesame"))
            held.cancel()
            assert answer.status_code == 200

    asyncio.run(ask())


def test_the_document_asks_for_a_key_where_one_is_due(make_app: MakeApp) -> None:
    locked, open_to_all = make_app(keys=KEYS).openapi(), make_app().openapi()
    for path in locked["paths"]:
        for method, operation in locked["paths"][path].items():
            assert ("security" in operation) == ("401" in operation["responses"]) == (path not in OPEN)
            assert "security" not in open_to_all["paths"][path][method]


@pytest.mark.parametrize("key", ["", "two words", "caf\xe9", "tab\tkey", "line\n"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="API key"):
        Settings(keys=(key,))


def test_settings_do_not_show_their_keys() -> None:
    assert "sesame" not in repr(Settings(keys=KEYS))


# ------------------------------------------------------------------------------------------------------------ tenants


def test_tenants_differ_by_key_and_by_salt(make_app: MakeApp) -> None:
    app = make_app(keys=KEYS)

    @app.get("/tenant")
    async def tell(request: Request, salt: str | None = None) -> str:
        return tenant(request, salt)

    client = TestClient(app)
    salts = (None, "a", "b", KEYS[1])
    told = [
        client.get("/tenant", params={"salt": salt} if salt else {}, headers=bearer(key)).json()
        for key in KEYS
        for salt in salts
    ]
    assert len(set(told)) == len(KEYS) * len(salts)
    assert not any(key in tenant for tenant in told for key in KEYS[:1])


SALTED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 1},
    "/v1/messages": {"max_tokens": 1},
    "/api/chat": {"options": {"num_predict": 1}, "stream": False},
}


@pytest.mark.parametrize("path", SALTED)
def test_every_protocol_has_salts_and_leaves_what_is_learned_to_the_client(engine: AsyncLLM, path: str) -> None:
    """The time of an answer tells what is cached: a salt must count, or be refused."""
    seen: list[Finished] = []
    client = TestClient(create_app({"parlay-mini": engine}, Settings(), [seen.append]))
    said = [
        {"role": "user", "content": f"The way to {path} is long, and has more words than a page of the cache. " * 3}
    ]
    for more in ({"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"store": False}):
        answer = client.post(path, json={"messages": said, **SALTED[path], **more})
        assert answer.status_code == 200
        assert "parlay-ignored" not in answer.headers
    assert [each.store for each in seen] == [True, True, True, False]
    cached = [each.output.outputs[0].metrics.cached_tokens for each in seen]
    assert cached[1] > 32 > max(cached[0], *cached[2:])


def test_without_keys_all_are_one_tenant(make_app: MakeApp) -> None:
    app = make_app()

    @app.get("/tenant")
    async def tell(request: Request) -> str:
        return tenant(request)

    assert TestClient(app).get("/tenant").json() == TestClient(app).get("/tenant", headers=bearer("x")).json() == ""


def test_what_a_router_learns_of_one_key_stays_with_it_and_names_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys may be called like paths: they make no file, and a request's salt makes nobody another key's owner."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # So dear that drafts always pay: how many there are then depends on the requests alone, not on the machine.
    monkeypatch.setattr("parlay.cost.measured.MeasuredCost.forward", lambda *_: 1.0)
    keys = ("../../one", "/etc/two")
    body = {"prompt": "one two three " * 8, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    llm = LLM("parlay-mini", strategy="auto:of=prompt-lookup", router_memory="per-key")
    with TestClient(create_app({"mini": AsyncLLM(llm)}, Settings(keys=keys))) as client:
        for _ in range(3):
            assert client.post("/v1/completions", json=body, headers=bearer(keys[0])).status_code == 200
        forged = {**body, "cache_salt": digest(keys[0])}
        assert client.post("/v1/completions", json=forged, headers=bearer(keys[1])).status_code == 200
    drafts = sorted(entry.arms["prompt-lookup"].calibration[-1] for entry in entries() if entry.owner)
    assert len(drafts) == 2
    assert drafts[1] > 2 * drafts[0], "the second key's router began with nothing"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["router.json"]
    assert not any(secret in place().read_text() for key in keys for secret in (key, digest(key)))


# --------------------------------------------------------------------------------------------------------- other sites


@pytest.fixture(scope="module")
def at_home(make_app: MakeApp) -> TestClient:
    return TestClient(make_app(hosts=("localhost", "[::1]")))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("[::1]:8000", 200),
        ("[::1]", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("", 403),
        ("localhost:80@evil.example", 403),
    ],
)
def test_a_foreign_host_name_is_turned_away(at_home: TestClient, host: str, status: int) -> None:
    assert at_home.get("/v1/models", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_other_sites_make_a_server_without_keys_do_nothing(make_app: MakeApp, site: str) -> None:
    """An image's address could load a model, and a form without fields write the cache to a file."""
    client = TestClient(make_app(hosts=("testserver",), cors_origins=("https://app.example",)))
    page = {"Sec-Fetch-Site": site}
    for method, address in (("GET", "/choices"), ("GET", "/props"), ("POST", "/slots/0?action=save")):
        assert client.request(method, address, headers=page).status_code == 403
        assert client.request(method, address, headers={"Sec-Fetch-Site": "same-origin"}).status_code != 403
        allowed = {**page, "Origin": "https://app.example"}
        assert client.request(method, address, headers=allowed).status_code != 403
    assert client.get("/", headers=page).status_code == 200  # who follows a link comes from another site


def test_other_origins_are_not_let_in_unless_asked_for(make_app: MakeApp) -> None:
    question = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    shut = TestClient(make_app()).options("/tokenize", headers=question)
    assert "Access-Control-Allow-Origin" not in shut.headers
    client = TestClient(make_app(keys=KEYS, cors_origins=("https://app.example",)))
    sent = "authorization,content-type,x-api-key,anthropic-version,x-stainless-lang"  # by official clients in a page
    allowed = client.options("/tokenize", headers={**question, "Access-Control-Request-Headers": sent})
    assert allowed.status_code == 200
    assert allowed.headers["Access-Control-Allow-Origin"] == "https://app.example"
    refused = client.get("/v1/models", headers={"Origin": "https://app.example"})
    assert refused.headers["Access-Control-Allow-Origin"] == "https://app.example"  # so that the page may read why
    assert (
        "Access-Control-Allow-Origin" not in client.get("/health", headers={"Origin": "https://evil.example"}).headers
    )
