"""Facts about a model that the page gets, and how the page is served."""

from __future__ import annotations

from starlette.testclient import TestClient

from parlay.strategies.catalogue import catalogue


def test_every_strategy_that_is_offered_answers_and_no_other_does(client: TestClient) -> None:
    offered = [strategy["name"] for strategy in client.get("/choices?model=parlay-mini").json()["strategies"]]
    answered = [
        name
        for name in catalogue()
        if client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "strategy": name}).status_code == 200
    ]
    assert offered == answered


def test_a_model_says_how_it_is_best_sampled_and_how_long_it_reads(client: TestClient) -> None:
    told = client.get("/choices").json()
    assert told["model"] == "parlay-mini"
    assert told["max_model_len"] == client.get("/v1/models").json()["data"][0]["max_model_len"]
    assert told["max_tokens"] is None
    assert told["chat"] is True
    assert told["sampling"].keys() >= {"temperature", "top_p"}


def test_a_model_that_is_not_there_has_no_choices(client: TestClient) -> None:
    assert client.get("/choices?model=unknown").json()["error"]["code"] == "model_not_found"


def test_a_browser_that_has_a_file_is_sent_nothing(client: TestClient) -> None:
    first = client.get("/page/app.js", headers={"Accept-Encoding": "gzip"})
    assert first.headers["Content-Encoding"] == "gzip"
    assert first.text == client.get("/page/app.js", headers={"Accept-Encoding": "identity"}).text
    again = client.get("/page/app.js", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_choices_come_packed_to_a_browser(client: TestClient) -> None:
    """The page asks for them at every visit, and all that it loads is to stay under 60 kB."""
    packed, plain = (client.get("/choices", headers={"Accept-Encoding": form}) for form in ("gzip, br", "identity"))
    assert packed.json() == plain.json()
    assert int(packed.headers["content-length"]) < 10_000 < int(plain.headers["content-length"])
    assert "content-encoding" not in plain.headers
