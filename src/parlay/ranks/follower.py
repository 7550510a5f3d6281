"""A rank other than 0: joins, loads its part, and repeats the calls of rank 0's runner until rank 0 ends or is lost."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Self

from parlay import models
from parlay.cache import BLOCK, Budget
from parlay.models.facts import read_facts
from parlay.models.fetch.resolving import resolve
from parlay.models.lora import digest_of
from parlay.ranks.adapters import AdapterShelf
from parlay.ranks.calls import Replay
from parlay.ranks.groups import shared_folder
from parlay.ranks.layout import Hello, Plan, build_name, decode_plan, decode_wanted, encode
from parlay.ranks.part import RankPart, join_group
from parlay.ranks.wire import Connection, Door, Kind, Stopped, listen
from parlay.types import ParlayError, Runner, RunnerLost, one_line

BEATS = 4
"""How many heartbeats a rank sends within the timeout. A rank that is silent for the whole timeout is lost."""
SLACK = 64
"""Extra pages of a follower's cache: it may still hold pages that rank 0 has given up to its drafters."""


def machine_name() -> str:
    """Return a name for the set of processes that can share memory with this one: the machine, and the device of the
    shared folder, which differs between containers."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat(shared_folder()).st_dev}"
    return f"{socket.gethostname()} {os.stat(shared_folder()).st_dev}"


def follow(
    connection: Connection,
    leader: tuple[str, int],
    secret: bytes,
    *,
    model: str | None = None,
    threads: int | None = None,
) -> None:
    """Run a part of a model until rank 0 ends. ``connection`` leads to rank 0, and ``leader`` is its address.

    ``model`` is the model's path here, if it differs from rank 0's. Raises ParlayError with the reason in one line, or
    RunnerLost if another rank is the cause.
    """
    with closing(connection), listen((connection.local_host, 0)) as listener:
        host, port = listener.getsockname()[:2]
        hello = Hello(build=build_name(), host=host, port=port, machine=machine_name())
        connection.send(Kind.HELLO, encode(hello))
        model = _own_files(connection, model)
        plan = decode_plan(connection.expect(Kind.PLAN)).with_threads(threads)
        connection.bound(plan.seconds)
        try:
            _run(connection, plan, model, partial(join_group, plan, Door(listener, secret, plan.seconds), leader))
        except Stopped as error:
            raise RunnerLost(f"rank {plan.rank} ends: {error}") from None
        except RunnerLost as error:
            raise RunnerLost(f"rank {plan.rank} ends: {_reason(connection, error)}") from None
        except Exception as error:
            with suppress(RunnerLost):
                connection.send(Kind.FAILED, one_line(error).encode())
            if isinstance(error, ParlayError | ValueError):
                raise ParlayError(f"rank {plan.rank} ends: {one_line(error)}") from None
            raise


def _run(connection: Connection, plan: Plan, model: str, join: Callable[[], RankPart]) -> None:
    with _Beats(connection, plan.seconds) as beats:
        part = beats.part = join()
        connection.send(Kind.JOINED)
        budget = Budget()  # one page, until rank 0 sends the number of pages
        if plan.lora is not None and digest_of(Path(plan.lora)) != plan.adapter:
            raise ParlayError(f"{plan.lora} has another adapter here than on rank 0: copy the files of rank 0")
        runner = models.load(model, plan.load, cache_tokens=BLOCK, budget=budget, make_forward=part)
        connection.send(Kind.READY, runner.spec.exactness.encode())
        pages = int(connection.expect(Kind.START)) // BLOCK
        budget.total *= plan.layout.spread(plan.rank).most(pages) + SLACK
        _repeat(connection, runner)


def _repeat(connection: Connection, runner: Runner) -> None:
    """Repeat rank 0's calls until it ends. Raises RunnerLost if it ends with an error."""
    adapters = AdapterShelf(runner, connection)
    replay = Replay(runner, adapters.by_number)
    while True:
        kind, content = connection.receive()
        if kind is Kind.CALLS:
            replay.run(content)
        elif kind is Kind.ADAPTER:
            adapters.read(content)
        elif kind is Kind.STOP:
            if content:
                raise Stopped(content.decode(errors="replace"))
            return


def _own_files(connection: Connection, model: str | None) -> str:
    """Return the model's name on this machine, after its files were found equal to rank 0's. Raises ParlayError if they
    differ."""
    wanted = decode_wanted(connection.expect(Kind.MODEL))
    connection.bound(wanted.seconds)
    name = model or wanted.model
    try:
        digest = read_facts(resolve(name)).digest
        if digest != wanted.digest:
            raise ParlayError(
                f"{name} has other weights on the rank at {connection.local_host} than on rank 0 "
                f"(SHA-256 {digest:.12}, {wanted.digest:.12}): copy the files of rank 0"
            )
    except (ParlayError, ValueError, OSError) as error:
        with suppress(RunnerLost):
            connection.send(Kind.FAILED, one_line(error).encode())
        raise ParlayError(one_line(error)) from None
    connection.send(Kind.MODEL)
    return name


class _Beats:
    """A context in which a thread sends this rank's heartbeats, and notices when rank 0 ends.

    When rank 0 ends, all waits for other ranks in ``part`` end, too.
    """

    def __init__(self, connection: Connection, seconds: float) -> None:
        self.part: RankPart | None = None
        self._connection, self._pause = connection, seconds / BEATS
        self._over = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._beat, name="parlay-rank-beat", daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()

    def _beat(self) -> None:
        with suppress(RunnerLost):
            while not self._over.is_set() and not self._connection.has_ended(self._pause):
                self._connection.send(Kind.BEAT)
        if self.part is not None and not self._over.is_set():
            self.part.give_up()


def _reason(connection: Connection, error: RunnerLost) -> str:
    """Return why this rank ends after losing another one: rank 0's reason if it sends one, else this rank's own. Rank 0
    is told the latter."""
    line = one_line(error)
    with suppress(RunnerLost):
        connection.send(Kind.FAILED, line.encode())
        while True:
            kind, content = connection.receive()
            if kind is Kind.STOP and content:
                return content.decode(errors="replace")
    return "rank 0 has ended" if connection.has_ended(0) else line
