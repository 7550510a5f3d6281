"""Ranks for tests. They are forks of one process that has loaded torch, so starting a rank costs only loading its part
of the model."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from parlay.engine import Engine
from parlay.router.policies import Plain
from parlay.sampling.rules import SharedNoise
from parlay.testing.conformance.stage import Steady
from parlay.types import NoiseKey, Request, Runner, SamplingParams, Strategy

PLAIN = Strategy("none", (), SharedNoise(), Plain())
FORKS = """
import ctypes, os, signal, sys, time
from parlay.options import LoadOptions, RankOptions
from parlay.ranks.follower import follow
from parlay.ranks.starting import lead
from parlay.ranks.wire import connect
from parlay.types import Segment

tag = ""

def say(text):
    os.write(1, f"{tag} {os.getpid()} {text}\\n".encode())  # in one piece: others write, too

def start(leader, count, secret, namespace, model=None):
    for _ in range(count):
        if os.fork() == 0:
            if namespace != "-":
                with open("/var/run/netns/" + namespace) as opened:
                    assert ctypes.CDLL(None).setns(opened.fileno(), 0) == 0
            say("joins")
            try:
                follow(connect(leader, secret, 0, 120), leader, secret, model=model)
            except Exception as error:
                say(error)
            else:
                say("is done")
            os._exit(0)
    return []

def lead_on(model):
    options = RankOptions(tensor_parallel=2, pipeline_parallel=2)
    load = LoadOptions(dtype="float32", device="cpu", threads=1)
    runner = lead(model, load, options, start=lambda *known: start(*known, "-"))
    say("leads")
    time.sleep(600)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    tag, host, *words = line.split()
    if host == "ready":
        say("is ready")
    elif host != "lead":
        port, secret, count, namespace, *model = words
        start((host, int(port)), int(count), secret.encode(), namespace, model[0] if model else None)
    elif os.fork() == 0:
        lead_on(words[0])
"""


class Crew:
    """Starts ranks, and receives the lines that they write."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._test = 0
        self.model = ""
        """The path at which the next ranks find their model, if it differs from rank 0's."""
        self.namespace = "-"
        """The network namespace in which the next ranks run; ``-``: this one."""
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, leader: tuple[str, int], count: int, secret: bytes) -> list[subprocess.Popen[bytes]]:
        """Start ranks, as `parlay.ranks.starting.Start` says."""
        assert self._process.stdin is not None
        known = f"{leader[0]} {leader[1]} {secret.decode()} {count} {self.namespace} {self.model}"
        self._process.stdin.write(f"{self._test} {known}\n")
        self._process.stdin.flush()
        return []

    def wait(self) -> None:
        """Wait until the process has loaded what ranks need, so that loading does not count against the seconds that
        tests give ranks to join."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self._test} ready\n")
        self._process.stdin.flush()
        self.said()

    def lead(self, model: Path) -> int:
        """Start four ranks, rank 0 included, and return rank 0's process id once all have written a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self._test} lead {model}\n")
        self._process.stdin.flush()
        processes = {line: process for process, line in (self.said() for _ in range(4))}
        return processes["leads"]

    def said(self) -> tuple[int, str]:
        """Return the next line of a rank that this test has started, with the rank's process id."""
        while True:
            test, process, line = self._lines.get(timeout=600).split(maxsplit=2)
            if int(test) == self._test:
                return int(process), line

    def begin(self) -> None:
        """Begin a test. Lines of earlier tests' ranks are ignored; these ranks end when their rank 0 is gone."""
        self._test += 1
        self.model, self.namespace = "", "-"

    def close(self) -> None:
        """End the process. Its ranks end when their rank 0 does."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.strip())


class Relay:
    """Passes messages between ranks and rank 0 on, ``delay`` seconds later, until `end`."""

    def __init__(self, leader: tuple[str, int], delay: float = 0.0) -> None:
        self._delay = delay
        self._leader, self._listener = leader, socket.create_server(("127.0.0.1", 0))
        self._lock, self._left, self._stalls = threading.Lock(), 1 << 62, False
        self._closed = threading.Event()
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def end(self, after: int, *, stalls: bool) -> None:
        """Pass on ``after`` more bytes, in both directions together. Then close all links or, if ``stalls``, pass
        nothing on."""
        with self._lock:
            self._left, self._stalls = after, stalls

    def close(self) -> None:
        self._listener.close()
        self._closed.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                joined, _ = self._listener.accept()
                ends = joined, socket.create_connection(self._leader)
                for source, sink in (ends, ends[::-1]):
                    threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError), source, sink:
            while content := source.recv(1 << 16):
                with self._lock:
                    passed = content[: self._left]
                    self._left -= len(passed)
                time.sleep(self._delay)
                sink.sendall(passed)
                if len(passed) < len(content):
                    if self._stalls:
                        self._closed.wait(120)
                    for each in (source, sink):
                        each.shutdown(socket.SHUT_RDWR)


@contextmanager
def limping(process: int) -> Iterator[None]:
    """Stop and continue a process again and again during the block."""
    over = threading.Event()

    def limp() -> None:
        while not over.wait(0.02):
            os.kill(process, signal.SIGSTOP)
            time.sleep(0.05)
            os.kill(process, signal.SIGCONT)

    thread = threading.Thread(target=limp)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def request(number: int, tokens: int) -> Request:
    params = SamplingParams(temperature=1.0, max_tokens=tokens)
    return Request(id=str(number), prompt=tuple(range(3 + number, 40)), params=params, key=NoiseKey(number))


class Steep(Steady):
    """A cost at which rows are so expensive that two groups always pay, on any machine."""

    def forward(self, rows: int, context: int) -> float:
        return 1000.0 * rows


def decode(runner: Runner, texts: dict[str, list[int]], tokens: int = 24) -> None:
    """Decode four requests, in several groups if the runner allows, and append their tokens to ``texts``."""
    engine = Engine(runner, Steep())
    for number in range(4):
        engine.add(request(number, tokens), PLAIN)
    while not engine.idle:
        for event in engine.step():
            texts.setdefault(event.request, []).extend(one.token for one in event.committed)


def texts_of(runner: Runner, tokens: int = 24) -> dict[str, list[int]]:
    """Decode four requests, and return their tokens."""
    texts: dict[str, list[int]] = {}
    decode(runner, texts, tokens)
    return texts


@pytest.fixture(scope="session")
def shared_crew() -> Iterator[Crew]:
    crew = Crew()
    crew.wait()
    yield crew
    crew.close()


@pytest.fixture
def crew(shared_crew: Crew) -> Crew:
    shared_crew.begin()
    return shared_crew
