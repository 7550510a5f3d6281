"""Real processes: a gateway's command line, and replicas that are killed, stopped and told to end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from parlay.cli import main, parser_of
from parlay.cli.serve_replicas import check_replicas

DEADLINE = 120
BODY: dict[str, Any] = {"model": "parlay-mini", "stream": True, "max_tokens": 600, "ignore_eos": True}


@contextmanager
def started(*words: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A command that listens on a free port: its process, its address, and the lines of its log so far."""
    command = [sys.executable, "-m", "parlay", *words, "--port", "0", "--log-level", "info"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        log: list[str] = []
        reader = threading.Thread(target=log.extend, args=(process.stderr,), daemon=True)
        reader.start()
        timer = threading.Timer(DEADLINE, process.kill)
        timer.start()
        try:
            yield process, process.stdout.readline().split()[-1], log
        finally:
            timer.cancel()
            process.terminate()
            try:
                process.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                process.kill()


def texts(url: str, count: int, during: Any = None) -> list[str]:
    """What so many streams say at once; ``during`` is called when all have begun."""
    found, begun = [""] * count, threading.Barrier(count + 1)

    def ask(number: int) -> None:
        body = {**BODY, "prompt": f"Number {number}", "seed": number}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=DEADLINE) as answer:
            assert answer.status_code == 200
            for place, line in enumerate(answer.iter_lines()):
                if place == 8:
                    begun.wait(DEADLINE)
                if line.startswith("data: {"):
                    found[number] += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    begun.wait(DEADLINE)
    if during is not None:
        during()
    for thread in threads:
        thread.join(DEADLINE)
    return found


@pytest.mark.slow
def test_replicas_killed_and_stopped_lose_nothing_and_come_back() -> None:
    with started("serve", "parlay-mini", "--replicas", "2", "--router-memory", "off") as (process, url, log):

        def numbers() -> list[int]:
            return [int(found[1]) for line in log if (found := re.search(r"replica \d is process (\d+)", line))]

        def ready(epochs: int) -> None:
            while len(numbers()) < epochs or set(httpx.get(f"{url}/health").json()["replicas"].values()) != {"ready"}:
                time.sleep(0.05)

        expected = texts(url, 6)
        assert texts(url, 6, lambda: os.kill(numbers()[0], signal.SIGKILL)) == expected
        ready(3)
        assert texts(url, 6, lambda: os.kill(numbers()[1], signal.SIGSTOP)) == expected
        os.kill(numbers()[1], signal.SIGKILL)
        ready(4)
        assert texts(url, 6, lambda: process.send_signal(signal.SIGHUP)) == expected
        ready(6)

        def twice() -> None:  # the second comes while the first is under way
            process.send_signal(signal.SIGHUP)
            time.sleep(0.5)
            process.send_signal(signal.SIGHUP)

        assert texts(url, 6, twice) == expected
        ready(9)
        assert texts(url, 6, process.terminate) == expected  # it drains
        assert process.wait(DEADLINE) == 0
        for number in numbers():
            with pytest.raises(ProcessLookupError):
                os.kill(number, 0)
        assert "parlay_gateway_streams_broken_total 0.0" not in "".join(log)


def test_a_replica_that_can_not_start_ends_everything_with_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no-such-model/at-all", "--replicas", "2", "--port", "0"]) == 1
    error = capfd.readouterr().err.splitlines()
    assert len([line for line in error if line.startswith("parlay: error:")]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--replicas", "0"], "give 1 to 64"),
        (["--replicas", "65"], "give 1 to 64"),
        (["--replicas", "2", "--allow-pull"], "leave it out, or --replicas"),
        (["--replicas", "2", "--drafter-only"], "leave it out, or --replicas"),
        (["--replicas", "2", "--record", "folder"], "leave it out, or --replicas"),
        (["--replicas", "2", "--lora-folder", "folder"], "--lora-folder is for one process"),
    ],
)
def test_flags_that_several_processes_can_not_honour(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_replicas(parser_of("serve").parse(words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --replica URL"),
        (["--replica", "localhost:8000"], "give the address of a server"),
        (["--replica", "http://h", "--replica", "http://h:80/"], "give each --replica once"),
        (["--replica", "http://h", "--health-seconds", "0"], "health_seconds must be above 0"),
        (["--replica", "http://h", "--retries", "-1"], "retries"),
        (["--replica", "http://h", "--port", "70000"], "--port must be between 0 and 65535"),
    ],
)
def test_wrong_flags_of_a_gateway_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gateway", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
