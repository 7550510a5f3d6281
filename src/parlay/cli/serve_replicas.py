"""`parlay serve --replicas N`: N processes that serve the same models, with a gateway in this process."""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing import Pipe, forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from parlay.cli import FAILURE
from parlay.cli.flags import whole
from parlay.cli.listening import announce
from parlay.cli.parser import USAGE
from parlay.cli.replica_process import KILL_SECONDS, ReplicaProcess, end_process, fits_twice, locked, run_replica
from parlay.serve.settings import Settings

if TYPE_CHECKING:
    from parlay.gateway.replicas import Fleet
    from parlay.serve.graceful import GracefulServer

logger = logging.getLogger(__name__)

MOST_REPLICAS = 64
_RESTART_SECONDS = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before an ended replica is restarted, the first time and later ones. A signal that ends all replicas arrives
within the first."""
_STEADY_SECONDS = 10.0
"""Seconds for which a replica must be ready until its next end counts as the first again."""
_PRELOADED = ["parlay.serve.app", "parlay.serve.server", "parlay.llm.llm", "parlay.llm.vocabulary"]
"""Modules that are imported once in the fork server, so that replicas start quickly."""
_LOADING_SECONDS = 1800.0
_WAIT_SECONDS = 60.0
"""Seconds that a request waits while no replica is ready and one is being restarted."""
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
    """Raises ValueError for flags that several processes can't honour."""
    if not 1 <= options.replicas <= MOST_REPLICAS:
        raise ValueError(f"--replicas must be between 1 and {MOST_REPLICAS}, got {options.replicas}")
    if options.replicas > 1 and (flags := of_one_process(options)):
        raise ValueError(
            f"{flags[0]} can't be used with --replicas, because it works only in one process: remove one of them"
        )


def of_one_process(options: argparse.Namespace) -> list[str]:
    """The given flags that several processes can't honour."""
    flags = {"--record": options.record, "--prefix-cache": options.prefix_cache, "--lora-folder": options.lora_folder}
    flags |= {"--drafter-only": options.drafter_only, "--allow-pull": options.allow_pull}
    return [flag for flag, given in flags.items() if given]


def serve_replicas(options: argparse.Namespace, allowed: Settings, listener: socket.socket, welcome: str) -> int:
    """Serve until the process is told to end; returns the exit code."""
    from parlay.gateway.app import create_gateway
    from parlay.gateway.settings import Address, GatewaySettings
    from parlay.serve.graceful import GracefulServer

    with tempfile.TemporaryDirectory(prefix="parlay-") as folder, locked(Path(folder)):
        sockets = [str(Path(folder) / str(number)) for number in range(1, options.replicas + 1)]
        # The gateway checks keys and host names if the replicas have none; with keys the replicas check them.
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

        def start() -> None:
            if threading.current_thread() is threading.main_thread():
                _hear_hang_ups(processes, server)
            processes.start()

        server = GracefulServer(gateway, start, shut_down, access_log=accesses)
        try:
            server.run(sockets=[listener])
        finally:
            processes.stop()
    return FAILURE if processes.failed else 0


def _hear_hang_ups(processes: Processes, server: GracefulServer) -> None:
    """Restart the replicas at SIGHUP; but end, as other servers do, if a closed terminal sends it.

    A closed terminal signals the whole process group, whose fork server must not end: the replicas would count as ended
    with it.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    forkserver.ensure_running()
    terminals = [number for number in range(3) if os.isatty(number)]

    def hear(signum: int, frame: FrameType | None) -> None:
        if all(map(os.isatty, terminals)):
            processes.restart()
        else:
            server.handle_exit(signum, frame)

    signal.signal(signal.SIGHUP, hear)


def _shared_out(options: argparse.Namespace) -> argparse.Namespace:
    """Each replica's flags, with its share of threads and memory."""
    from parlay.cache import MemoryBounds
    from parlay.models.opening import cache_bytes_for
    from parlay.system import threads

    own = argparse.Namespace(**vars(options))
    own.threads = max(1, (options.threads or threads.usual()) // options.replicas)
    own.memory = MemoryBounds.parse(options.memory).shared_out(options.replicas, cache_bytes_for(1))
    own.replicas, own.host = 1, "127.0.0.1"
    return own


class Processes:
    """The replicas' processes, watched by a thread: one that ends is restarted, at once if it had been ready for long.

    If one ends before it was ever ready, all are ended, as their flags or model must be wrong.
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
        self._patience = drain_seconds + KILL_SECONDS
        self._welcome = welcome
        self._running: dict[int, ReplicaProcess] = {}
        self._falls = dict.fromkeys(range(len(sockets)), 0)
        self._due: dict[int, float] = {}
        self._leaving: list[ReplicaProcess] = []
        """Old processes that have been replaced and finish their requests."""
        self._to_renew: deque[int] = deque()
        """Replicas that the rolling update has yet to restart."""
        self._next: ReplicaProcess | None = None
        """The new process for the first of these, which replaces the old one as soon as it is ready."""
        self._wake_read, self._wake_write = Pipe(duplex=False)
        self._stopping = threading.Event()
        self._renew = False
        self._thread = threading.Thread(target=self._watch, name="replicas", daemon=True)
        self.failed = False
        """Whether a replica could not start."""

    def start(self) -> None:
        self._thread.start()

    def restart(self) -> None:
        """Restart all replicas one by one, each when the one before is ready. This is safe in a signal handler."""
        self._renew = True
        self._wake_write.send(None)

    def leave_alone(self) -> None:
        """Restart no replica from now on."""
        self._stopping.set()
        self._wake_write.send(None)

    def stop(self) -> None:
        """End all replicas, gracefully at first, and the thread."""
        self.leave_alone()
        if self._thread.is_alive():
            self._thread.join()
        left = [*self._running.values(), *self._leaving, *([self._next] if self._next is not None else [])]
        for one in left:
            one.process.terminate()
        end = time.monotonic() + KILL_SECONDS  # the gateway is closed, so no request is left to drain
        for one in left:
            end_process(one.process, max(0.0, end - time.monotonic()))

    # -------------------------------------------------------------------------------------------------- in the thread

    def _watch(self) -> None:
        if not self._start_all():
            return
        announce(self._welcome)
        while not self._stopping.is_set():
            try:
                self._listen()
                self._mend()
                self._start_anew()
            except (OSError, EOFError) as error:  # no new process now: look again later
                logger.warning("a process can't be started: %r", error)
                self._stopping.wait(_RESTART_SECONDS[1])

    def _start_all(self) -> bool:
        """Start all replicas; returns whether all became ready, and otherwise ends them."""
        first, *others = self._falls
        place = first
        try:
            for places in ([first], others):  # the first one reports errors in flags or model for all
                for place in places:
                    self._running[place] = self._begin(place)
                for place in places:
                    if not self._starts(place):
                        self._fail(place)
                        return False
        except (OSError, EOFError) as error:
            logger.error("a process can't be started: %r", error)
            self._fail(place)
            return False
        return True

    def _begin(self, place: int) -> ReplicaProcess:
        news, says = Pipe(duplex=False)
        process = self._context.Process(target=run_replica, args=(self._options, self._sockets[place], says))
        process.start()
        says.close()
        logger.info("replica %d is process %s", place + 1, process.pid)
        return ReplicaProcess(process, news)

    def _starts(self, place: int) -> bool:
        """Whether a replica becomes ready and the gateway sees it. It does not if its process ends or all are being
        ended."""
        one, end = self._running[place], time.monotonic() + _LOADING_SECONDS
        while one.alive and not self._stopping.is_set() and time.monotonic() < end:
            self._wait(one.waited_for, 1.0 if one.ready_at is None else 0.05)
            if one.becomes_ready():
                self._fleet.report_new(place)
            if self._fleet.replicas[place].state == "ready":
                return True
        return False

    def _listen(self) -> None:
        """Wait for news of a process, a call of this object, or the next deadline."""
        watched = [one for place, one in self._running.items() if place not in self._due and not one.gone]
        watched += self._leaving + ([] if self._next is None else [self._next])
        times = [*self._due.values(), *(one.kill_at for one in watched if one.kill_at is not None)]
        seconds = min(times, default=math.inf) - time.monotonic()
        self._wait([each for one in watched for each in one.waited_for], max(0.0, min(seconds, _NEVER)))

    def _wait(self, objects: Sequence[Connection | int], seconds: float) -> None:
        if self._wake_read in wait_for([*objects, self._wake_read], seconds):
            self._wake_read.recv()

    def _mend(self) -> None:
        """Restart ended replicas when due, and kill those that take too long to end."""
        self._leaving = [one for one in self._leaving if one.alive]
        for one in [*self._running.values(), *self._leaving]:
            if one.kill_at is not None and one.kill_at <= time.monotonic():
                one.process.kill()
        for place, one in list(self._running.items()):
            if one.becomes_ready():
                self._fleet.report_new(place)
            if self._due.get(place, math.inf) <= time.monotonic():
                del self._due[place]
                self._running[place] = self._begin(place)
            elif not one.alive and one.kill_at is None and place not in self._due and not self._adopts(place, one):
                self._note_end(place, one)

    def _adopts(self, place: int, one: ReplicaProcess) -> bool:
        """Whether the replica serves on although the fork server has ended: it is replaced as in a rolling update."""
        if not one.orphaned or not (place in self._to_renew or fits_twice(one.process)):
            return False
        if place not in self._to_renew:
            self._to_renew.append(place)
            logger.warning("replica %d will be replaced: the process that started it has ended", place + 1)
        return True

    def _note_end(self, place: int, one: ReplicaProcess) -> None:
        """Schedule a replica's restart, unless all are being ended: a signal to all may reach its process first."""
        self._fleet.report_loss(place, "its process has ended")
        if self._stopping.wait(_RESTART_SECONDS[0]):
            return
        steady = one.ready_at is not None and time.monotonic() - one.ready_at > _STEADY_SECONDS
        self._falls[place] = falls = 1 if steady else self._falls[place] + 1
        seconds = 0.0 if falls == 1 else _RESTART_SECONDS[min(falls, len(_RESTART_SECONDS)) - 1]
        self._due[place] = time.monotonic() + seconds
        wait = f" in {seconds:g} s" if seconds else ""
        logger.warning("replica %d has ended, and is started again%s", place + 1, wait)

    # ----------------------------------------------------------------------------------------------- the rolling update

    def _start_anew(self) -> None:
        """Take the next step of the rolling update, if one is under way."""
        if self._renew and self._next is None:
            self._renew = False
            self._to_renew = deque(self._running)
            announce(f"starting {len(self._running)} replicas anew, one after another")
        if not self._to_renew:
            return
        place, old = self._to_renew[0], self._running[self._to_renew[0]]
        if self._next is not None:
            self._take_over(place, old, self._next)
        elif place in self._due:
            self._to_renew.rotate(-1)  # it will be restarted anyway
        elif not old.alive or fits_twice(old.process):
            self._next = self._begin(place)
        elif old.kill_at is None:
            logger.warning(
                "replica %d is stopped before it is restarted, because memory is too small for both", place + 1
            )
            old.let_go(self._patience)

    def _take_over(self, place: int, old: ReplicaProcess, new: ReplicaProcess) -> None:
        """Let the new process replace the old one when it is ready; the old one finishes its requests."""
        if new.becomes_ready():
            self._next = None
            self._running[place] = new
            self._leaving.append(old)
            self._fleet.report_new(place)
            if old.kill_at is None:
                old.let_go(self._patience)
            self._to_renew.popleft()
            left = f"{len(self._to_renew)} to go" if self._to_renew else "all are new"
            announce(f"replica {place + 1} is new, after {time.monotonic() - new.began:.1f} seconds: {left}")
            self._start_anew()
        elif not new.alive and not self._stopping.wait(_RESTART_SECONDS[0]):
            self._next, old.kill_at = None, None
            self._to_renew.clear()
            logger.warning("replica %d could not be restarted: it and the others keep running as they are", place + 1)
            if old.orphaned:
                self._note_end(place, old)

    def _fail(self, place: int) -> None:
        """End everything, unless that is under way already. A replica that ended by itself has reported why."""
        if self._stopping.is_set():
            return
        self.failed = True
        if place not in self._running or self._running[place].process.exitcode not in (FAILURE, USAGE):
            print(f"parlay: error: replica {place + 1} did not start: the log says why", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGTERM)
