"""One process of `parlay serve --replicas`: how the gateway's process sees it, and what it does itself."""

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

_LETTING_GO = 0.5
"""Seconds in which the system lets go of all that a process held which has ended."""


@dataclass(slots=True, eq=False)
class ReplicaProcess:
    """A replica's process, which says once through ``news`` that it takes requests at the replica's address."""

    process: ForkServerProcess
    news: Connection
    began: float = field(default_factory=time.monotonic)
    ready_at: float | None = None
    """When it became ready, if it did."""
    kill_at: float | None = None
    """When it was told to end: until when it may finish what it has."""

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    @property
    def gone(self) -> bool:
        """Whether it has ended as it was told to."""
        return self.kill_at is not None and not self.alive

    @property
    def waited_for(self) -> list[Connection | int]:
        """Objects of which one is ready once there is news of it."""
        return [self.process.sentinel, *([] if self.ready_at is not None or not self.alive else [self.news])]

    def becomes_ready(self) -> bool:
        """Whether it has become ready since this was last called."""
        if self.ready_at is not None or not self.news.poll():
            return False
        with suppress(EOFError):  # it has ended
            self.news.recv()
            self.ready_at = time.monotonic()
        return self.ready_at is not None

    def let_go(self, patience: float) -> None:
        """Tell it to finish what it has and end."""
        self.kill_at = time.monotonic() + patience
        self.process.terminate()


def fits_twice(process: ForkServerProcess) -> bool:
    """Whether there is memory for another process like this one."""
    import torch

    from parlay.models.opening import anonymous_bytes, free_bytes

    return process.pid is not None and anonymous_bytes(process.pid) <= free_bytes(torch.device("cpu"))


def end_process(process: ForkServerProcess, seconds: float) -> None:
    """Wait for a process that was told to end; kill it after so many seconds."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()


def run_replica(options: argparse.Namespace, path: str, says: Connection) -> None:
    """Be a replica: the main function of its process, which ends when its parent does."""
    from tqdm import tqdm

    from parlay.cli.listening import set_up_logging

    tqdm.set_lock(threading.RLock())  # its own is for several processes, and outlives one that is killed
    os.setpgid(0, 0)  # Ctrl-C is for the parent, which lets the replicas end in its own time
    set_up_logging(options)
    threading.Thread(target=_end_with_parent, args=(Path(path).parent,), daemon=True).start()
    sys.exit(guarded(lambda: _serve_at(options, path, says)))


def _serve_at(options: argparse.Namespace, path: str, says: Connection) -> int:
    """Listen at the path once the model is loaded: until then the process that was there before may have it."""
    from parlay.cli.serve import serve_on

    own = f"{path}.{os.getpid()}"

    def ready() -> None:
        os.replace(own, path)
        says.send(None)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(own)
        listener.listen(1024)
        serve_on(options, listener, ready)
    return 0


def _end_with_parent(folder: Path) -> None:
    """End when the parent does, and take the folder of the sockets away that one left which was killed."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    time.sleep(_LETTING_GO)
    with suppress(OSError), held(folder):  # a parent that goes on holds it, as where the server of forks has ended
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder in the block, so that nobody else can; whoever ends lets go of it. Raises OSError if it is held."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
