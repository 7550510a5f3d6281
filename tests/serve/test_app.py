"""The application: every failure has OpenAI's shape and names its field, and shutting down turns latecomers away."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

import parlay
from parlay.aio import AsyncLLM, Busy, Closed, Lost
from parlay.serve.app import create_app
from parlay.serve.errors import ApiError
from parlay.serve.settings import Settings
from parlay.strategies.catalogue import listing
from parlay.types import ParlayError

JSON = {"Content-Type": "application/json"}


def error_of(response: object) -> dict[str, object]:
    """The error, after a look at its shape."""
    (detail,) = response.json().values()
    assert set(detail) == {"message", "type", "param", "code"}
    assert detail["message"]
    assert "\n" not in detail["message"]
    return detail


# ---------------------------------------------------------------------------------------------------------- bad input

BAD_BODIES = {
    "malformed": (b'{"prompt": ', None, "not JSON"),
    "nothing": (b"", None, "missing"),
    "not UTF-8": (b'{"prompt": "\xff"}', None, "UTF-8"),
    "too deep": (b"[" * 100_000, None, "can't be read"),
    "a list": (b"[]", None, "object"),
    "half a surrogate pair": (b'{"prompt": "\\ud800"}', None, "surrogate"),
    "half a surrogate pair in a name": (b'{"prompt": "x", "\\udfff": 1}', None, "surrogate"),
    "wrong type": (b'{"prompt": 3}', "prompt", "string"),
    "not a number": (b'{"prompt": NaN}', "prompt", "string"),
    "inside a list": (b'{"messages": [{"role": "user", "content": null}]}', "messages[0].content", "string"),
    "missing": (b'{"messages": [{"role": "user"}]}', "messages[0].content", "missing"),
    "unknown role": (b'{"messages": [{"role": "king", "content": "x"}]}', "messages[0].role", "user"),
    "unknown field": (b'{"prompt": "x", "promt": "y"}', "promt", "unsupported"),
    "both of two": (b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}]}', "prompt", "unsupported"),
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_a_bad_body_is_a_400_that_names_the_field(client: TestClient, case: str) -> None:
    body, param, named = BAD_BODIES[case]
    response = client.post("/tokenize", content=body, headers=JSON)
    error = error_of(response)
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert named in str(error["message"])


def test_a_body_of_another_type_is_refused(client: TestClient) -> None:
    """A web page may send text to any address without asking; JSON it may not."""
    response = client.post("/tokenize", content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"})
    assert response.status_code == 400
    assert "application/json" in error_of(response)["message"]


def test_a_long_name_is_not_repeated_at_length(client: TestClient) -> None:
    response = client.post("/tokenize", json={"prompt": "x", "y" * 10_000: 1})
    assert len(response.content) < 1000


@pytest.mark.parametrize("name", ["nope", "../parlay-mini", "/etc", "", "parlay-mini/", "\u2028", "x" * 5000])
def test_an_unknown_model_is_a_404_and_never_a_path(client: TestClient, name: str) -> None:
    response = client.post("/tokenize", json={"prompt": "x", "model": name})
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert len(response.content) < 1000


def test_an_unknown_address_is_a_404_in_the_same_shape(client: TestClient) -> None:
    for address in ("/nothing", "/v1", "/health/", "/docs", "/redoc"):
        response = client.get(address)
        assert response.status_code == 404
        error_of(response)


def test_a_wrong_method_is_a_405_that_says_which_are_right(client: TestClient) -> None:
    response = client.get("/tokenize")
    assert (response.status_code, response.headers["Allow"]) == (405, "POST")
    error_of(response)


# ------------------------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize(
    ("raised", "status", "told"),
    [
        (ApiError(418, "no coffee", "pot", "teapot"), 418, "no coffee"),
        (Busy("full"), 429, "waiting"),
        (Closed("closed"), 503, "shutting down"),
        (Lost("rank 1 has ended"), 503, "rank 1 has ended"),
        (ParlayError("this model has no chat template"), 400, "chat template"),
        (RuntimeError("the password is 1234"), 500, "internal error"),
    ],
)
def test_what_is_raised_becomes_an_answer(
    make_app: Callable[..., FastAPI], raised: Exception, status: int, told: str
) -> None:
    app = make_app()

    @app.get("/raise")
    async def fail() -> None:
        raise raised

    response = TestClient(app, raise_server_exceptions=False).get("/raise")
    assert response.status_code == status
    assert told in error_of(response)["message"]
    assert "1234" not in response.text
    assert ("Retry-After" in response.headers) == (status in (429, 503))


def test_a_bug_keeps_its_traceback_for_the_log(make_app: Callable[..., FastAPI]) -> None:
    app = make_app()

    @app.get("/raise")
    async def fail() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        TestClient(app).get("/raise")


# ------------------------------------------------------------------------------------------------- what there is to see


def test_models(client: TestClient, engine: AsyncLLM) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == "parlay-mini"
    assert model["object"] == "model"
    assert model["max_model_len"] == engine.llm.engine.max_context
    assert client.get("/v1/models/parlay-mini").json() == model
    assert client.get("/v1/models/other").status_code == 404


def test_a_model_may_carry_a_slash_in_its_name(engine: AsyncLLM) -> None:
    client = TestClient(create_app({"org/mini": engine}))
    for address in ("/v1/models/org/mini", "/v1/models/org%2Fmini"):
        assert client.get(address).json()["id"] == "org/mini"


def test_a_server_needs_a_model() -> None:
    with pytest.raises(ValueError, match="at least one model"):
        create_app({})


def test_strategies_are_those_of_the_command_line(client: TestClient) -> None:
    assert client.get("/strategies").json() == json.loads(json.dumps(listing()))


def test_version_and_health(client: TestClient) -> None:
    assert client.get("/version").json() == {"version": parlay.__version__}
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("/", "text/html"),
        ("/page/index.html", "text/html"),
        ("/page/style.css", "text/css"),
        ("/page/app.js", "text/javascript"),
    ],
)
def test_the_page_may_load_nothing_from_elsewhere(client: TestClient, address: str, kind: str) -> None:
    response = client.get(address)
    assert response.status_code == 200
    assert response.headers["Content-Type"] == f"{kind}; charset=utf-8"
    assert response.headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self';")
    assert response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("name", ["../app.py", "..%2fapp.py", "%2e%2e/app.py", "app.js/", "", ".", "app.py", "%00"])
def test_the_page_has_its_own_files_and_no_others(client: TestClient, name: str) -> None:
    assert client.get(f"/page/{name}").status_code == 404


# ------------------------------------------------------------------------------------------------------------ the end


class Closing:
    """An engine that notes how it is closed."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.llm, self.stats = engine.llm, engine.stats
        self.alive = True
        self.closed: list[float | None] = []

    async def close(self, drain_seconds: float | None = None) -> None:
        self.alive = False
        self.closed.append(drain_seconds)


def test_shutting_down_drains_every_model_and_turns_latecomers_away(engine: AsyncLLM) -> None:
    engines = {"one": Closing(engine), "two": Closing(engine)}
    client = TestClient(create_app(engines, Settings(drain_seconds=7, retry_after=3)))
    with client:
        assert client.get("/ready").status_code == 200
    for closed in (engine.closed for engine in engines.values()):
        assert len(closed) == 1
        assert 0 < (closed[0] or 0) <= 7, "seven seconds, with what users of the model took of them"
    late = client.post("/tokenize", json={"prompt": "x"})
    assert (late.status_code, late.headers["Retry-After"]) == (503, "3")
    assert error_of(late)["code"] == "unavailable"
    assert client.get("/ready").status_code == 503
    assert client.get("/health").status_code == 200  # whoever watches should not end what ends by itself


def test_a_model_whose_ranks_are_lost_is_not_ready_until_it_is_loaded_again(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request has to come first: a gateway sends none to a server that is not ready."""
    losses, made, may_load = [""], list[Closing](), threading.Event()
    monkeypatch.setattr(engine.llm, "loss", lambda: losses[0])

    def load() -> Closing:
        if made:
            may_load.wait(600)
        losses[0] = ""
        made.append(Closing(engine))
        return made[-1]

    app = create_app({"one": load})  # type: ignore[dict-item]
    app.state.registry.load_now("one")
    with TestClient(app) as client:
        assert client.get("/ready").status_code == 200
        losses[0] = "rank 1 has ended"
        answer = client.get("/ready")
        assert answer.status_code == 503
        assert "rank 1 has ended" in error_of(answer)["message"]
        until = time.monotonic() + 600
        while not made[0].closed and time.monotonic() < until:
            assert client.get("/ready").status_code == 503
            time.sleep(0.05)
        may_load.set()
        while client.get("/ready").status_code == 503 and time.monotonic() < until:
            time.sleep(0.05)
        assert client.get("/ready").status_code == 200
        assert len(made) == 2


def test_a_dead_engine_is_unhealthy(engine: AsyncLLM) -> None:
    dead = Closing(engine)
    dead.alive = False
    client = TestClient(create_app({"one": dead}))
    response = client.get("/health")
    assert response.status_code == 503
    assert "one" in error_of(response)["message"]
