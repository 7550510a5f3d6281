"""A process of its own, with limits of time and memory, for what must not harm this one."""

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
"""For a machine that gives the process no computing time, the start of the process included."""
_LAST_SECONDS = 10.0
"""Between the end of a connection and that of the process, on a machine that gives it little time."""


class LimitMet(Exception):
    """An answer took more than there is. The text says of what."""


class NoAnswer(LimitMet):
    """The process did not answer in time, though it met no limit of its own."""


class BoundedProcess:
    """Runs ``module`` as a program that answers messages by `serve`. Any thread may use it.

    It is started when it is first asked, and again after a limit has ended it. ``purpose`` is what needs it.
    """

    def __init__(self, module: str, first: bytes, purpose: str) -> None:
        self._module = module
        self._first = first
        self._purpose = purpose
        self._running: _Running | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start it now, if it does not run."""
        with self._lock:
            self._begun()

    def end(self) -> None:
        """End it, if it runs."""
        with self._lock:
            if self._running is not None:
                self._running.end()
            self._running = None

    def ask(self, message: bytes, cpu_seconds: float) -> bytes:
        """The answer to a message. Raises LimitMet, and ParlayError where no process can be started."""
        with self._lock:
            running = self._begun()
            try:
                return running.ask(message, cpu_seconds)
            except TimeoutError:
                met: LimitMet = NoAnswer(f"the {_WALL_SECONDS:g} seconds that there are")
                self._drop(running)
            except (EOFError, OSError):
                met = running.limit(cpu_seconds)
                self._drop(running)
            except BaseException:  # Ctrl-C: its answer would be taken for that to the next message
                self._drop(running)
                raise
        raise met

    def _begun(self) -> _Running:
        self._running = self._running or _Running(self._module, self._first, self._purpose)
        return self._running

    def _drop(self, running: _Running) -> None:
        running.end()
        self._running = None


class _Running:
    """A process that runs, and the connection to it. It ends at the latest with this object."""

    def __init__(self, module: str, first: bytes, purpose: str) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            process = subprocess.Popen(
                # -P: nothing is imported from the working folder, which may hold somebody else's files
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
        with suppress(OSError):  # it has ended already: who asks it finds that out
            self._connection.send_bytes(first)

    def ask(self, message: bytes, cpu_seconds: float) -> bytes:
        """Raises TimeoutError where no answer comes in time, EOFError or another OSError where the process ends."""
        self._connection.send_bytes(f"{cpu_seconds} ".encode() + message)
        if not self._connection.poll(_WALL_SECONDS):
            raise TimeoutError
        return self._connection.recv_bytes()

    def limit(self, cpu_seconds: float) -> LimitMet:
        """Which limit a process has met that has ended its connection."""
        try:
            ended = self._process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            return NoAnswer(f"the {_LAST_SECONDS:g} seconds that there are")
        if ended == -signal.SIGPROF:
            return LimitMet(f"the {cpu_seconds:g} seconds of computing that there are")
        return LimitMet("the memory or stack that there is")


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()


def serve(prepare: Callable[[bytes], Answer], *, memory: int, stack: int) -> None:
    """The program's side: what ``prepare`` makes of the first message answers all others, until the connection ends.

    ``memory`` bounds what answers take, in bytes above what ``prepare`` took; ``stack`` is theirs too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with whoever started it
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
            signal.setitimer(signal.ITIMER_PROF, float(cpu_seconds))  # ends the process, whatever it is doing
            found = answer(message)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(found)
    except (EOFError, OSError):
        return


def _limit_memory(memory: int) -> None:
    """Only where the system tells how much is in use."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        limit = int(pages.read_text().split()[0]) * resource.getpagesize() + memory
        _, most = resource.getrlimit(resource.RLIMIT_AS)  # as ulimit -v sets it, which nobody may raise
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
