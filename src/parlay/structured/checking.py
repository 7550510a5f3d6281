"""Has constraints compiled in a process of their own before this one compiles them.

A definition can exhaust the compiler's stack, which ends the process that compiles it. So another process goes first.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import Connection

from parlay.structured.limits import schema_of
from parlay.types import ParlayError, StructuredOutputsParams

CPU_SECONDS = 2.0
"""Computing time for one constraint."""
_WALL_SECONDS = 10.0
"""For a machine that gives it none."""
_LAST_SECONDS = 0.5
"""Between the end of a connection and that of the process."""


class Checker:
    """Starts `parlay.structured.checker` when it is first needed, and again after a constraint has ended it.

    ``vocabulary`` is as `LLTokenizer` takes it. Any thread may use it.
    """

    def __init__(self, vocabulary: dict[str, object]) -> None:
        self._vocabulary = json.dumps(vocabulary).encode()
        self._process: _Process | None = None
        self._lock = threading.Lock()

    def end(self) -> None:
        """End the process, if it runs."""
        with self._lock:
            if self._process is not None:
                self._process.end()
            self._process = None

    def check(self, question: bytes) -> str:
        """The definition for what `spelled` gave, which has been compiled once.

        Raises ValueError for what is not valid or is too large.
        """
        with self._lock:
            self._process = self._process or _Process(self._vocabulary)
            try:
                answer = json.loads(self._process.ask(question))
            except (EOFError, OSError):
                limit = self._process.limit()
                self._process.end()
                self._process = None
                raise ValueError(f"structured_outputs took more than {limit} to compile: ask for less") from None
        if "error" in answer:
            raise ValueError(answer["error"])
        return str(answer["definition"])


def spelled(wanted: StructuredOutputsParams) -> bytes:
    """What is asked as JSON; a schema given as text and one given as data are the same."""
    schema = None if wanted.json is None else schema_of(wanted.json)
    others = {"regex": wanted.regex, "choice": wanted.choice, "grammar": wanted.grammar}
    return json.dumps({"json": schema, "json_object": wanted.json_object, **others}).encode()


class _Process:
    """A checker that runs, and the connection to it. It ends at the latest with this object."""

    def __init__(self, vocabulary: bytes) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "parlay.structured.checker", str(theirs.fileno())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise ParlayError(f"structured output needs a second process, which can't be started: {error}") from None
        finally:
            theirs.close()
        self._process = process
        self._connection = Connection(ours.detach())
        self.end = weakref.finalize(self, _end, process, self._connection)
        self._connection.send_bytes(vocabulary)

    def ask(self, message: bytes) -> bytes:
        """Raises EOFError or OSError where the process does not answer."""
        self._connection.send_bytes(message)
        if not self._connection.poll(_WALL_SECONDS):
            raise EOFError
        return self._connection.recv_bytes()

    def limit(self) -> str:
        """Which limit an answer that did not come has met."""
        try:
            ended = self._process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            return f"the {_WALL_SECONDS:g} seconds that there are"
        if ended == -signal.SIGPROF:
            return f"the {CPU_SECONDS:g} seconds of computing that there are"
        return "the memory or stack that there is"


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()
