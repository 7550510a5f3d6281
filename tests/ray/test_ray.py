"""The deployment of Ray Serve: its shape, and a replica of it that answers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from parlay.options import LoadOptions
from parlay.ray import application, server
from parlay.serve.settings import Settings
from parlay.types import ParlayError
from tests.gateway.test_processes import started, texts


def test_without_ray_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ParlayError, match=r"pip install 'parlay\[serve,ray\]'"):
        application("parlay-mini")


def test_a_replica_is_the_whole_server() -> None:
    app = server(["mini=parlay-mini"], LoadOptions(threads=1), None, Settings(drain_seconds=0))
    with TestClient(app) as client:
        answer = client.post("/v1/completions", json={"model": "mini", "prompt": "The sea", "max_tokens": 4})
        assert answer.json()["usage"]["completion_tokens"] == 4


def replicas_of_ray() -> list[int]:
    """Their process numbers."""
    found = [file.parent.name for file in Path("/proc").glob("[0-9]*/cmdline") if _is_replica(file)]
    return sorted(map(int, found))


def _is_replica(cmdline: Path) -> bool:
    try:
        return cmdline.read_bytes().startswith(b"ray::ServeReplica")
    except OSError:  # it has ended since
        return False


@pytest.mark.slow
def test_streams_outlive_a_replica_of_ray_that_is_killed() -> None:
    """Ray sends what the gateway asks for again to the other replica, which goes on with the same texts."""
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 8767})
        serve.run(application("parlay-mini", cpus=0.5, sticky=True, min_replicas=2, max_replicas=2), name="parlay")
        with started("gateway", "--replica", "http://127.0.0.1:8767") as (_, url, log):
            expected = texts(url, 16)
            assert texts(url, 16, lambda: os.kill(replicas_of_ray()[0], signal.SIGKILL)) == expected
            assert any("is lost" in line for line in log)
    finally:
        serve.shutdown()
        ray.shutdown()
