"""A process of `parlay serve --replicas`: the gateway's view of it, and its main function."""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from parlay.cli import guarded

KILL_SECONDS = 10.0
"""Seconds until a replica without requests is killed."""
_LETTING_GO = 0.5
"""Seconds in which the system frees what an ended process held."""


@dataclass(slots=True, eq=False)
class ReplicaProcess:
    """A replica's process; it sends one message through ``news`` when it accepts requests at its socket."""

    process: ForkServerProcess
    news: Connection
    began: float = field(default_factory=time.monotonic)
    ready_at: float | None = None
    """When it became ready; None before that."""
    kill_at: float | None = None
    """The time until which it may finish its requests, set when it was told to end."""

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    @property
    def gone(self) -> bool:
        """Whether it has ended after being told to."""
        return self.kill_at is not None and not self.alive

    @property
    def orphaned(self) -> bool:
        """Whether it serves on, though the fork server has ended and ``alive`` is False; it ends with this object."""
        return self.ready_at is not None and self.kill_at is None and not self.alive and not self.news.poll()

    @property
    def waited_for(self) -> list[Connection | int]:
        """Objects to wait for: one of them becomes ready when the process has news."""
        if self.orphaned:
            return [self.news]
        return [self.process.sentinel, *([] if self.ready_at is not None or not self.alive else [self.news])]

    def becomes_ready(self) -> bool:
        """Whether the replica has become ready since the last call."""
        if self.ready_at is not None or not self.news.poll():
            return False
        with suppress(EOFError):  # the process has ended
            self.news.recv()
            self.ready_at = time.monotonic()
        return self.ready_at is not None

    def let_go(self, patience: float) -> None:
        """Tell the process to finish its requests and end."""
        self.kill_at = time.monotonic() + patience
        self.process.terminate()


def fits_twice(process: ForkServerProcess) -> bool:
    """Whether there is memory for a second process of this size."""
    import torch

    from parlay.models.opening import anonymous_bytes, free_bytes

    return process.pid is not None and anonymous_bytes(process.pid) <= free_bytes(torch.device("cpu"))


def end_process(process: ForkServerProcess, seconds: float) -> None:
    """Wait for a process that was told to end, and kill it after ``seconds``."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()


def run_replica(options: argparse.Namespace, path: str, says: Connection) -> None:
    """The main function of a replica's process; it ends when the parent does."""
    from tqdm import tqdm

    from parlay.cli.listening import set_up_logging

    tqdm.set_lock(threading.RLock())  # tqdm's own lock is shared by processes, and outlives one that is killed
    os.setpgid(0, 0)  # Ctrl-C is for the parent, which ends the replicas
    set_up_logging(options)
    parting = (Path(path).parent, options.drain_seconds + KILL_SECONDS)
    threading.Thread(target=_end_with_parent, args=parting, daemon=True).start()
    sys.exit(guarded(lambda: _serve_at(options, path, says)))


def _serve_at(options: argparse.Namespace, path: str, says: Connection) -> int:
    """Listen at ``path`` after the model is loaded, as the replica's previous process may use it until then."""
    from parlay.cli.serve import serve_on

    own = f"{path}.{os.getpid()}"

    def ready() -> None:
        with suppress(FileNotFoundError, BrokenPipeError):  # the parent is gone, and this process is about to end, too
            os.replace(own, path)
            says.send(None)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(own)
        listener.listen(1024)
        serve_on(options, listener, ready)
    return 0


def _end_with_parent(folder: Path, patience: float) -> None:
    """End when the parent does, and remove the socket folder of a parent that was killed.

    Requests under way may finish within ``patience`` seconds. Then the process is killed, as nobody else would end one
    that hangs. The system's own signal for a parent's death can't be used: the system's parent is the fork server.
    """
    parent = parent_process()
    assert parent is not None
    parent.join()
    time.sleep(_LETTING_GO)
    with suppress(OSError), locked(folder):  # a living parent holds it, as when only the fork server has ended
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(patience)
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder while the block runs; the lock ends with the process. Raises OSError if it is locked."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
