"""`parlay serve --replicas N`: N processes that serve the same models, behind a gateway in this one."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing import connection, get_context, parent_process
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli import FAILURE, USAGE, guarded
from parlay.cli.flags import whole
from parlay.serve.settings import Settings

if TYPE_CHECKING:
    from parlay.gateway.replicas import Fleet

logger = logging.getLogger(__name__)

MOST_REPLICAS = 64
_RESTART_SECONDS = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Before a replica that ended is started anew, the first time and later ones. A signal that ends all comes first."""
_PRELOADED = ["parlay.serve.app", "parlay.serve.server", "parlay.llm.llm", "parlay.llm.vocabulary"]
"""Modules of all replicas, imported once: each replica is forked from a process that has it, and starts quickly."""
_LOADING_SECONDS = 1800.0
_WAIT_SECONDS = 60.0
"""How long a request waits while no replica is ready: one that ended is being started again."""
_KILL_SECONDS = 10.0
"""Beyond the time for draining, until a replica is killed."""
_NEVER = 3600.0


def add_replica_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--replicas",
        type=whole,
        default=1,
        metavar="N",
        help="serve from N processes, which share threads and memory out, behind a gateway; one that dies is started "
        "again while others go on with its streams; SIGHUP restarts one after another (default: 1)",
    )


def check_replicas(options: argparse.Namespace) -> None:
    """Raises ValueError for what several processes can't do."""
    if not 1 <= options.replicas <= MOST_REPLICAS:
        raise ValueError(f"--replicas {options.replicas}: give 1 to {MOST_REPLICAS}")
    if options.replicas > 1 and options.record is not None:
        raise ValueError("--record keeps one process's files: leave it out, or --replicas")
    if options.replicas > 1 and options.prefix_cache is not None:
        raise ValueError("--prefix-cache keeps one process's prefixes: leave it out, or --replicas")
    if options.replicas > 1 and options.drafter_only:
        raise ValueError("--drafter-only is one process: leave it out, or --replicas")
    if options.replicas > 1 and options.allow_pull:
        raise ValueError("--allow-pull adds a model to one process: leave it out, or --replicas")


def serve_replicas(options: argparse.Namespace, allowed: Settings, listener: socket.socket, welcome: str) -> int:
    """Serve until the process is told to end; returns the exit code."""
    from parlay.gateway.app import create_gateway
    from parlay.gateway.settings import Address, GatewaySettings
    from parlay.serve.server import GracefulServer

    with tempfile.TemporaryDirectory(prefix="parlay-") as folder:
        sockets = [str(Path(folder) / str(number)) for number in range(1, options.replicas + 1)]
        # Keys and host names are the gateway's to check where the replicas have none; with keys they check them.
        settings = GatewaySettings(
            hosts=allowed.hosts,
            max_body_bytes=allowed.max_body_bytes,
            concurrency=allowed.concurrency * options.replicas,
            wait_seconds=_WAIT_SECONDS,
            drain_seconds=allowed.drain_seconds,
        )
        gateway = create_gateway([Address(socket=path) for path in sockets], settings)
        processes = Processes(_shared_out(options), sockets, gateway.fleet, allowed.drain_seconds, welcome)
        accesses = options.log_level in ("debug", "info")

        async def shut_down(*, at_once: bool = False) -> None:
            processes.leave_alone()
            await gateway.shut_down(at_once=at_once)

        server = GracefulServer(gateway, processes.start, shut_down, access_log=accesses)
        with suppress(ValueError):  # not in the main thread, as in tests
            signal.signal(signal.SIGHUP, lambda *_: processes.restart())
        try:
            server.run(sockets=[listener])
        finally:
            processes.stop()
    return FAILURE if processes.failed else 0


def _shared_out(options: argparse.Namespace) -> argparse.Namespace:
    """The flags of each replica: its part of the threads and of the memory."""
    from parlay.cache import parse_bytes
    from parlay.models.opening import cache_bytes_for
    from parlay.system import threads

    own = argparse.Namespace(**vars(options))
    own.threads = max(1, (options.threads or threads.usual()) // options.replicas)
    memory = parse_bytes(options.memory) // options.replicas if options.memory else cache_bytes_for(options.replicas)
    own.memory, own.replicas, own.host = str(memory), 1, "127.0.0.1"
    return own


class Processes:
    """The replicas' processes, which a thread watches: one that ends is started again, at once if it was ready.

    If one ends before it was ever ready, all end, for its flags or its model are wrong.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        sockets: list[str],
        fleet: Fleet,
        drain_seconds: float,
        welcome: str,
    ) -> None:
        self._options = options
        self._sockets = sockets
        self._fleet = fleet
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        self._patience = drain_seconds + _KILL_SECONDS
        self._welcome = welcome
        self._running: dict[int, ForkServerProcess] = {}
        self._epochs: dict[int, int] = {}
        """The replicas' epochs when their processes began."""
        self._falls = dict.fromkeys(range(len(sockets)), 0)
        self._due: dict[int, float] = {}
        self._wake_read, self._wake_write = connection.Pipe(duplex=False)
        self._stopping = False
        self._renew = False
        self._thread = threading.Thread(target=self._watch, name="replicas", daemon=True)
        self.failed = False
        """Whether a replica could not start."""

    def start(self) -> None:
        self._thread.start()

    def restart(self) -> None:
        """Have all started anew, one after another, each when the one before it is ready. Safe in a signal handler."""
        self._renew = True
        self._wake_write.send(None)

    def leave_alone(self) -> None:
        """Start none again from now on."""
        self._stopping = True
        self._wake_write.send(None)

    def stop(self) -> None:
        """End all, gently at first, and the watch."""
        self.leave_alone()
        if self._thread.is_alive():
            self._thread.join()
        for process in self._running.values():
            process.terminate()
        end = time.monotonic() + self._patience
        for process in self._running.values():
            _end(process, max(0.0, end - time.monotonic()))

    # -------------------------------------------------------------------------------------------------- in the thread

    def _watch(self) -> None:
        first, *others = self._falls
        for places in ([first], others):  # what is wrong with flags or model, one says
            for place in places:
                self._begin(place)
            for place in places:
                if not self._becomes_ready(place, 0):
                    return self._fail(place)
        print(self._welcome, flush=True)
        while not self._stopping:
            if self._renew:
                self._renew = False
                self._restart_all()
            self._mend()

    def _begin(self, place: int) -> None:
        self._due.pop(place, None)
        self._epochs[place] = self._epoch(place)
        process = self._context.Process(target=_run_replica, args=(self._options, self._sockets[place]))
        process.start()
        self._running[place] = process
        logger.info("replica %d is process %s", place + 1, process.pid)

    def _epoch(self, place: int) -> int:
        return self._fleet.replicas[place].epoch

    def _mend(self) -> None:
        """Wait until a process ends or one is due, and start what is due."""
        wait = min((due - time.monotonic() for due in self._due.values()), default=_NEVER)
        self._listen(max(0.0, wait))
        for place, process in list(self._running.items()):
            if not process.is_alive() and place not in self._due and not self._stopping:
                self._fleet.report_loss(place, "its process has ended")
                self._falls[place] = 0 if self._epoch(place) > self._epochs[place] else self._falls[place] + 1
                seconds = _RESTART_SECONDS[min(self._falls[place], len(_RESTART_SECONDS) - 1)]
                self._due[place] = time.monotonic() + seconds
                logger.warning("replica %d has ended: it is started again in %g seconds", place + 1, seconds)
        for place, due in list(self._due.items()):
            if due <= time.monotonic() and not self._stopping:
                self._begin(place)

    def _listen(self, seconds: float) -> None:
        """Until a process ends, somebody calls, or the time is over."""
        ends = [process.sentinel for place, process in self._running.items() if place not in self._due]
        for ready in connection.wait([*ends, self._wake_read], seconds):
            if ready is self._wake_read:
                self._wake_read.recv()

    def _restart_all(self) -> None:
        for place, replica in enumerate(self._fleet.replicas):
            if self._stopping:
                return
            epoch, process = replica.epoch, self._running[place]
            process.terminate()
            _end(process, self._patience)
            self._begin(place)
            if not self._becomes_ready(place, epoch):
                logger.warning("replica %d did not start again: the others stay as they are", place + 1)
                return

    def _becomes_ready(self, place: int, epoch: int) -> bool:
        """Whether it becomes ready again after that epoch. It does not if its process ends, or all are to end."""
        end = time.monotonic() + _LOADING_SECONDS
        while self._epoch(place) == epoch:
            if self._stopping or not self._running[place].is_alive() or time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def _fail(self, place: int) -> None:
        """End everything, unless that is under way. A replica that ended by itself has said why."""
        if self._stopping:
            return
        self.failed = True
        if self._running[place].exitcode not in (FAILURE, USAGE):
            print(f"parlay: error: replica {place + 1} did not start: see the log", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGTERM)


def _end(process: ForkServerProcess, seconds: float) -> None:
    """Wait for a process that was told to end; kill it after so many seconds."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()


def _run_replica(options: argparse.Namespace, path: str) -> None:
    """Be a replica: the main function of its process, which ends when its parent does."""
    from tqdm import tqdm

    from parlay.cli.listening import set_up_logging

    tqdm.set_lock(threading.RLock())  # its own is for several processes, and outlives one that is killed
    set_up_logging(options)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(guarded(lambda: _serve_at(options, path)))


def _serve_at(options: argparse.Namespace, path: str) -> int:
    from parlay.cli.serve import serve_on

    Path(path).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1024)
        serve_on(options, listener, lambda: None)
    return 0


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
