"""A server of four ranks under load, of which one limps and then hangs: the same texts, and it comes back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from parlay.models.fetch.resolving import resolve
from parlay.models.loading import read_config
from parlay.testing.adapters import save_adapter
from tests.ranks.conftest import limping

SECONDS = 30.0
"""The ranks' time: child processes have to start within it, too, on a busy machine."""
MODELS = ("parlay-mini", "one", "two")


class Server(NamedTuple):
    process: int
    at: str

    def ask(self, number: int) -> tuple[int, str]:
        """The answer of the base or of an adapter to a request, and its status."""
        body = {"model": MODELS[number % 3], "prompt": f"Once upon a time {number}", "max_tokens": 40, "seed": number}
        reply = httpx.post(f"{self.at}/v1/completions", json=body, timeout=10 * SECONDS)
        return reply.status_code, reply.json()["choices"][0]["text"] if reply.is_success else reply.text

    def ask_all(self) -> list[tuple[int, str]]:
        """Eight requests at once, and 36 in all."""
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(self.ask, range(36)))

    def wait(self) -> None:
        """Wait until it is ready."""
        until = time.monotonic() + 10 * SECONDS
        while httpx.get(f"{self.at}/ready").status_code != 200:
            assert time.monotonic() < until
            time.sleep(0.2)

    def ranks(self) -> list[int]:
        """The processes of the other ranks."""
        found = subprocess.run(["pgrep", "-P", str(self.process)], capture_output=True, text=True, check=True)
        return [int(word) for word in found.stdout.split()]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    adapters = []
    for seed, name in enumerate(MODELS[1:]):
        folder = save_adapter(tmp_path / name, read_config(resolve("parlay-mini")), alpha=40, seed=seed)
        adapters.append(f"{name}={folder}")
    words = ["serve", "parlay-mini", "--port", "0", "--dtype", "float32", "--rank-timeout", str(SECONDS)]
    words += ["--tensor-parallel", "2", "--context-parallel", "2", "--lora-modules", *adapters]
    with subprocess.Popen([sys.executable, "-m", "parlay", *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = next(found for line in process.stdout if (found := re.search(r"http://\S+", line)))
            found = Server(process.pid, address.group())
            found.wait()
            yield found
        finally:
            process.send_signal(signal.SIGINT)


@pytest.mark.slow
def test_a_rank_that_limps_changes_no_text_and_one_that_hangs_is_replaced(server: Server) -> None:
    """Requests in flight on a rank that hangs fail; the others are served when all ranks are new, and none is wrong."""
    expected = server.ask_all()
    assert {code for code, _ in expected} == {200}
    assert len(set(expected)) > 30
    (*_, process) = server.ranks()
    with limping(process):
        assert server.ask_all() == expected
    os.kill(process, signal.SIGSTOP)
    found = server.ask_all()
    lost = [reply for reply, own in zip(found, expected, strict=True) if reply != own]
    assert 0 < len(lost) <= 8, "what was in flight"
    named = [reply for reply in lost if re.search(r"rank [123] has \w+ ", reply[1])]
    assert named
    assert {code for code, _ in named} <= {500, 503}
    assert {reply[0] for reply in lost if reply not in named} <= {503}, "who comes in between is told to try again"
    server.wait()
    assert process not in server.ranks()
    assert server.ask_all() == expected
