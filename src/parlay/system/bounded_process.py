"""Runs untrusted or expensive work in a process of its own, with limits of time and memory."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from parlay.types import ParlayError

Answer = Callable[[bytes], bytes]

_WALL_SECONDS = 60.0
"""The most seconds of wall-clock time for an answer, including the start of the process. It applies if the process gets
little or no CPU time."""
_LAST_SECONDS = 10.0
"""The most seconds between the end of the connection and the end of the process, which may get little CPU time."""


class LimitMet(Exception):
    """An answer exceeded a limit, which the message names."""


class NoAnswer(LimitMet):
    """The process did not answer within the wall-clock limit, though it did not exceed its limits of CPU time and
    memory."""


class BoundedProcess:
    """Runs ``module`` as a program that answers messages by `serve`. Any thread may use it.

    The first message starts the process. After a limit has ended the process, the next message starts it again.
    ``purpose`` says in error messages what needs the process.
    """

    def __init__(self, module: str, first: bytes, purpose: str) -> None:
        self._module = module
        self._first = first
        self._purpose = purpose
        self._running: _Running | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process now, if it is not running."""
        with self._lock:
            self._started()

    def end(self) -> None:
        """End the process, if it is running."""
        with self._lock:
            if self._running is not None:
                self._running.end()
            self._running = None

    def ask(self, message: bytes, cpu_seconds: float) -> bytes:
        """Return the answer to a message. Raises LimitMet, and ParlayError if no process can be started."""
        with self._lock:
            running = self._started()
            try:
                return running.ask(message, cpu_seconds)
            except TimeoutError:
                met: LimitMet = NoAnswer(f"the {_WALL_SECONDS:g} seconds allowed")
                self._drop(running)
            except (EOFError, OSError):
                met = running.limit(cpu_seconds)
                self._drop(running)
            except BaseException:  # such as Ctrl-C: a late answer would be taken for the answer to the next message
                self._drop(running)
                raise
        raise met

    def _started(self) -> _Running:
        self._running = self._running or _Running(self._module, self._first, self._purpose)
        return self._running

    def _drop(self, running: _Running) -> None:
        running.end()
        self._running = None


class _Running:
    """A running process, and the connection to it. The process ends when this object is deleted, or before."""

    def __init__(self, module: str, first: bytes, purpose: str) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            process = subprocess.Popen(
                # -P: nothing is imported from the working folder, whose files may be anyone's
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise ParlayError(f"{purpose} needs a second process, which can't be started: {error}") from None
        finally:
            theirs.close()
        self._process = process
        self._connection = Connection(ours.detach())
        self.end = weakref.finalize(self, _end, process, self._connection)
        with suppress(OSError):  # the process has ended already, which `ask` will report
            self._connection.send_bytes(first)

    def ask(self, message: bytes, cpu_seconds: float) -> bytes:
        """Return the answer.

        Raises TimeoutError if the answer is late, and EOFError or another OSError if the process ends.
        """
        self._connection.send_bytes(f"{cpu_seconds} ".encode() + message)
        if not self._connection.poll(_WALL_SECONDS):
            raise TimeoutError
        return self._connection.recv_bytes()

    def limit(self, cpu_seconds: float) -> LimitMet:
        """Return the limit that ended the process; call it after the connection has broken."""
        try:
            ended = self._process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            return NoAnswer(f"the {_LAST_SECONDS:g} seconds allowed")
        if ended == -signal.SIGPROF:
            return LimitMet(f"the {cpu_seconds:g} seconds of CPU time allowed")
        return LimitMet("the memory or stack allowed")


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()


def serve(prepare: Callable[[bytes], Answer], *, memory: int, stack: int) -> None:
    """Run the child process's side: ``prepare`` gets the first message and returns a function that answers all others.

    ``memory`` bounds the bytes that answers may use beyond those of ``prepare``; ``stack`` is the size of their stack.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(stack)
    thread = threading.Thread(target=_answer_all, args=(Connection(int(sys.argv[1])), prepare, memory))
    thread.start()
    thread.join()


def _answer_all(connection: Connection, prepare: Callable[[bytes], Answer], memory: int) -> None:
    try:
        answer = prepare(connection.recv_bytes())
        _limit_memory(memory)
        while True:
            cpu_seconds, _, message = connection.recv_bytes().partition(b" ")
            signal.setitimer(signal.ITIMER_PROF, float(cpu_seconds))  # nothing catches its signal
            found = answer(message)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(found)
    except (EOFError, OSError):
        return


def _limit_memory(memory: int) -> None:
    """Limit the memory to ``memory`` bytes more than are in use now, if the system tells how much that is."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        limit = int(pages.read_text().split()[0]) * resource.getpagesize() + memory
        _, most = resource.getrlimit(resource.RLIMIT_AS)  # the limit of ulimit -v, which can't be raised
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
