"""One key's use is bounded, and another key does not notice it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from parlay.cli.serve import add_arguments, settings
from parlay.serve.errors import ApiError
from parlay.serve.guard.auth import Quotas, digest
from parlay.serve.settings import KeyLimits

MakeApp = Callable[..., FastAPI]
BODY: dict[str, Any] = {"model": "parlay-mini", "prompt": "Hello", "max_tokens": 8}


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(flags)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_tokens_are_counted_by_key_and_fade(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(keys=("one", "two"), key_limits=KeyLimits(tokens=8))
    client = TestClient(app)
    assert client.post("/v1/completions", json=BODY, headers=bearer("one")).status_code == 200
    refused = client.post("/v1/completions", json=BODY, headers=bearer("one"))
    assert refused.status_code == 429
    assert "8 tokens a minute" in refused.json()["error"]["message"]
    assert int(refused.headers["Retry-After"]) >= 1
    assert client.post("/v1/completions", json=BODY, headers=bearer("two")).status_code == 200
    app.state.limiter.quotas._used[digest("one")] = (9.0, -100.0)
    assert client.post("/v1/completions", json=BODY, headers=bearer("one")).status_code == 200


def test_a_guided_request_counts_what_runs_after_both_prompts(make_app: MakeApp) -> None:
    app = make_app(keys=("plain", "guided"), key_limits=KeyLimits(tokens=1000))
    body = BODY | {"ignore_eos": True, "temperature": 0, "strategy": "none"}
    used = []
    with TestClient(app) as client:
        for key, more in (("plain", {}), ("guided", {"guidance_scale": 2, "negative_prompt": "Hello"})):
            reply = client.post("/v1/completions", json=body | more, headers=bearer(key))
            assert reply.status_code == 200, reply.text
            used.append(round(app.state.limiter.quotas._used[digest(key)][0]))
    assert used[1] == 2 * used[0]


def test_requests_at_once_are_counted_by_key() -> None:
    quotas = Quotas(KeyLimits(requests=2), {"own": KeyLimits(requests=1)}, 1)
    for owner in ("one", "one", "own"):
        quotas.enter(owner)
    for owner, most in (("one", 2), ("own", 1)):
        with pytest.raises(ApiError, match=f"{most} requests of this key are under way"):
            quotas.enter(owner)
    quotas.leave("one")
    quotas.enter("one")


def test_a_key_may_be_kept_from_urgency(make_app: MakeApp) -> None:
    client = TestClient(
        make_app(keys=("one", "own"), key_limits=KeyLimits(priority=0), own_limits={"own": KeyLimits()})
    )
    refused = client.post("/v1/completions", json=BODY | {"priority": -16}, headers=bearer("one"))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "priority"
    assert client.post("/v1/completions", json=BODY | {"priority": 3}, headers=bearer("one")).status_code == 200
    assert client.post("/v1/completions", json=BODY | {"priority": -16}, headers=bearer("own")).status_code == 200


def test_limits_of_a_key_stand_beside_it_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("plain\nown requests=4 tokens=1000 priority=-2\n")
    allowed = settings(parsed("--api-key-file", str(file), "--key-requests", "9"))
    assert allowed.keys == ("plain", "own")
    assert allowed.own_limits["plain"] == KeyLimits(requests=9)
    assert allowed.own_limits["own"] == KeyLimits(requests=4, tokens=1000, priority=-2)
    wrong = {"speed=4": "is not a setting of a key", "requests=--4": "is not a setting of a key"}
    for word, why in (
        wrong | {f"tokens={'9' * 5000}": "out of range: a whole number may have at most 64 bits"}
    ).items():
        file.write_text(f"own {word}\n")
        with pytest.raises(ValueError, match=why):
            settings(parsed("--api-key-file", str(file)))
