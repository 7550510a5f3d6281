"""Measures links between ranks: the time that two processes on this machine take for an exchange."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from parlay.compiled.library import NotLoaded, load
from parlay.ranks.groups import SharedGroup, SocketGroup, make_shared_file
from parlay.ranks.wire import Connection
from parlay.types import ParlayError

_SIZES = ((64, 400), (1 << 15, 100))
"""How many numbers a short and a long sum have, and how often each sum is timed."""
_SECONDS = 60.0
"""Seconds allowed for the other process to start; it imports torch."""
_COMMAND = "import sys; from parlay.ranks.links import answer; answer(sys.argv[1], int(sys.argv[2]))"


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """Bytes per second of a long exchange, and seconds of a short one."""

    bandwidth: float
    latency: float


def measure_links() -> dict[str, MeasuredLink]:
    """Time sums with a second process over ``shared memory`` and ``sockets``; this starts and ends the process.

    Raises ParlayError if the process can't be started or does not answer, or if there is no compiled library.
    """
    try:
        load()
    except NotLoaded as error:
        raise ParlayError(f"links can't be measured without the compiled library: {error}") from None
    file = make_shared_file(2)
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(_SECONDS)
            words = [sys.executable, "-c", _COMMAND, str(file), str(listener.getsockname()[1])]
            with subprocess.Popen(words, stdin=subprocess.DEVNULL) as other:
                try:
                    opened, _ = listener.accept()
                    return _timed(file, opened, 0)
                finally:
                    other.kill()
    except OSError as error:
        raise ParlayError(f"links can't be measured: no second process answers ({error})") from None
    finally:
        file.unlink()


def answer(file: str, port: int) -> None:
    """Run the second process, which computes the same sums."""
    _timed(Path(file), socket.create_connection(("127.0.0.1", port), _SECONDS), 1)


def _timed(file: Path, opened: socket.socket, member: int) -> dict[str, MeasuredLink]:
    with closing(Connection(opened, 1 - member, _SECONDS)) as connection:
        sockets = SocketGroup({1 - member: connection}, (0, 1), member)
        shared = SharedGroup(file, (0, 1), member, _SECONDS)
        found = {}
        for name, group in (("shared memory", shared), ("sockets", sockets)):
            (short, less), (long, more) = [(4 * size, _seconds(group.add, size, times)) for size, times in _SIZES]
            if group.loss is not None:
                raise ParlayError(f"links can't be measured: {group.loss.reason}")
            found[name] = MeasuredLink((long - short) / max(1e-9, more - less), less)
        return found


def _seconds(add: Callable[[torch.Tensor], None], size: int, times: int) -> float:
    """Return the median seconds of ``times`` sums."""
    numbers, found = torch.zeros(size), list[float]()
    for _ in range(times):
        began = time.perf_counter()
        add(numbers)
        found.append(time.perf_counter() - began)
    return median(found)
