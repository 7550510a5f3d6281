"""Requests say what their texts may lose; wishes that contradict each other are refused, with the field's name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from starlette.testclient import TestClient

LOSSY = "prompt-lookup:rule=threshold"
MESSAGES = [{"role": "user", "content": "Hello"}]
ROUTES = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 4},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 16},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/api/chat": {"messages": MESSAGES, "stream": False, "options": {"num_predict": 4}},
    "/api/generate": {"prompt": "Once upon a time", "stream": False, "options": {"num_predict": 4}},
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("level", ["bits", "seed", "distribution", "lossy:floor=0.9", "bitz", "lossy:floor=2"])
def test_a_lossy_strategy_beside_another_wish_is_refused(client: TestClient, route: str, level: str) -> None:
    body = {"model": "parlay-mini", **ROUTES[route], "strategy": LOSSY, "exactness": level}
    reply = client.post(route, json=body)
    assert reply.status_code == 400
    assert "exactness" in reply.text
    assert "\\n" not in reply.text


@pytest.mark.parametrize("route", ROUTES)
def test_wishes_that_can_be_had_are_granted(client: TestClient, route: str) -> None:
    for wishes in ({"exactness": "bits"}, {"exactness": "lossy", "strategy": LOSSY}, {"exactness": "lossy:floor=0.9"}):
        assert client.post(route, json={"model": "parlay-mini", **ROUTES[route], **wishes}).status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_every_api_takes_the_seed_that_its_reply_tells(client: TestClient, route: str) -> None:
    """A request without a seed draws one, and with it the text can be had again."""
    body: dict[str, Any] = {"model": "parlay-mini", **copy.deepcopy(ROUTES[route])}
    sampling = body["options"] if route.startswith("/api/") else body
    sampling["temperature"] = 1.5
    drawn = client.post(route, json=body).json()["parlay"]["seed"]
    for seed in (drawn, 2**53 - 1):
        sampling["seed"] = seed
        reply = client.post(route, json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["parlay"]["seed"] == seed
    sampling["seed"] = 2**64
    assert "seed must be a whole number from -9223372036854775808" in client.post(route, json=body).text


def test_the_reply_names_field_and_level(client: TestClient) -> None:
    body = {"model": "parlay-mini", **ROUTES["/v1/completions"]}
    error = client.post("/v1/completions", json={**body, "strategy": LOSSY, "exactness": "seed"}).json()["error"]
    assert error["param"] == "exactness"
    assert error["message"].startswith("exactness seed forbids strategy prompt-lookup:rule=threshold, which is lossy")
    lossy = client.post("/v1/completions", json={**body, "strategy": LOSSY}).json()
    assert lossy["parlay"]["exactness"] == "lossy"
