"""Wraps a peer engine as a decoder: its processes, the modes of each, and their environment variables."""

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
"""Before and after a peer's turn, so that the threads of one process have stopped spinning when the next begins."""


class PeerDecoder:
    """Implements `Decoder`: greedy, one request at a time. A strategy is one of the peer's modes.

    ``python`` is the interpreter of its environment, or a sentence that says why there is none. Processes start when
    they are first asked, and end with ``stack``.
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
        """See `Decoder`. Raises Failed where the peer has no answer."""
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
    """Environment variables: as many threads for all, on the first cores where an engine wants to be told which."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    own = {name: value.format(cores=cores) for name, value in peer.environment.items()}
    usual = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {"PYTHONPATH": "src", **usual, **own}  # what runners need of Parlay is there, and needs no library
