"""Wraps a peer engine as a decoder, with its processes and their environment variables."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.peers.catalogue import Peer
from benchmarks.peers.protocol import Task
from benchmarks.peers.worker import Failed, Limits, Worker
from parlay.bench.wave import Ask, Wave, lone_wave

PAUSE_SECONDS = 0.02
"""A pause in seconds before and after a peer's turn, in which the threads of the last process stop spinning."""


class PeerDecoder:
    """Implements `Decoder` for one greedy request at a time. A strategy is one of the peer's modes.

    ``python`` is the interpreter of the peer's environment, or a sentence that says why there is none. A process starts
    at its first request, and ends with ``stack``.
    """

    def __init__(self, peer: Peer, python: Path | str, task: Task, limits: Limits, stack: ExitStack) -> None:
        self._absent = python if isinstance(python, str) else ""
        self._workers: dict[str, Worker] = {}
        for modes in peer.processes():
            command = (str(python), "-m", peer.module, json.dumps(asdict(task)))
            log = Path(task.cache) / "logs" / f"{peer.engine}-{modes[0]}.log"
            worker = Worker(command, surroundings(peer, task.threads), log, limits)
            stack.callback(worker.close)
            self._workers |= dict.fromkeys(modes, worker)

    def decode(self, strategy: str, asks: Sequence[Ask], temperature: float) -> Wave:
        """Decode as `Decoder` says. Raises Failed if the peer has no answer."""
        if self._absent:
            raise Failed(self._absent)
        if len(asks) != 1 or temperature:
            raise Failed("peers are measured greedily, with one request at a time")
        (ask,) = asks
        worker = self._workers[strategy]
        time.sleep(PAUSE_SECONDS)
        reading = worker.decode(strategy, ask.ids, ask.most)
        time.sleep(PAUSE_SECONDS)
        note = "; ".join(filter(None, (worker.version, reading.note)))
        return lone_wave(ask, strategy, replace(reading, note=note))


def surroundings(peer: Peer, threads: int) -> dict[str, str]:
    """Return environment variables that give every engine the same number of threads, on the first cores if it wants
    a list."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    own = {name: value.format(cores=cores) for name, value in peer.environment.items()}
    usual = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {"PYTHONPATH": "src", **usual, **own}  # runners import only modules of Parlay that need no library
