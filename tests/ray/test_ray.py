"""The deployment of Ray Serve: its shape, and a replica of it that answers."""

from __future__ import annotations

import os

import pytest
from starlette.testclient import TestClient

from parlay.options import LoadOptions
from parlay.ray import application, server
from parlay.serve.settings import Settings
from parlay.types import ParlayError


def test_without_ray_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ParlayError, match=r"pip install 'parlay\[serve,ray\]'"):
        application("parlay-mini")


def test_a_replica_is_the_whole_server() -> None:
    app = server(["mini=parlay-mini"], LoadOptions(threads=1), None, Settings(drain_seconds=0))
    with TestClient(app) as client:
        answer = client.post("/v1/completions", json={"model": "mini", "prompt": "The sea", "max_tokens": 4})
        assert answer.json()["usage"]["completion_tokens"] == 4


@pytest.mark.slow
def test_ray_serves_it() -> None:
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import httpx

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 8767})
        serve.run(application("parlay-mini", cpus=0.5, sticky=True, max_replicas=1), name="parlay")
        body = {"model": "parlay-mini", "prompt": "The sea", "max_tokens": 4}
        answer = httpx.post("http://127.0.0.1:8767/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 4
    finally:
        serve.shutdown()
        ray.shutdown()
