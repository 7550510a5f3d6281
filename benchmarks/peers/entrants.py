"""From the catalogue to entrants: the processes behind each peer, and what they find in their environment."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.figures.systems import Timed
from benchmarks.peers.catalogue import Peer
from benchmarks.peers.protocol import Task
from benchmarks.peers.rounds import Entrant
from benchmarks.peers.worker import Failed, Limits, Worker


def enter(peer: Peer, python: Path | str, task: Task, limits: Limits, stack: ExitStack) -> list[Entrant]:
    """A peer's modes. Their processes start when they are first asked, and end with the stack.

    ``python`` is the interpreter of its environment, or a sentence that says why there is none.
    """
    if isinstance(python, str):
        return [Entrant(peer.engine, mode, peer.engine, partial(absent, python)) for mode in peer.modes]
    entrants = []
    for modes in peer.processes():
        process = f"{peer.engine}-{modes[0]}"
        command = (str(python), "-m", peer.module, json.dumps(asdict(task)))
        log = Path(task.cache) / "logs" / f"{process}.log"
        worker = Worker(command, surroundings(peer, task.threads), log, limits)
        stack.callback(worker.close)
        for mode in modes:
            entrants.append(Entrant(peer.engine, mode, process, partial(worker.decode, mode), worker.told_version))
    return entrants


def absent(reason: str, ids: Sequence[int], most: int) -> Timed:
    """What a peer that isn't there answers."""
    raise Failed(reason)


def surroundings(peer: Peer, threads: int) -> dict[str, str]:
    """Environment variables: as many threads for all, on the first cores where an engine wants to be told which."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    own = {name: value.format(cores=cores) for name, value in peer.environment.items()}
    return {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | own
