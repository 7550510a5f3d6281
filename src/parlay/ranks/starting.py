"""Starts the ranks of a model: as child processes on this machine, or by waiting until ranks of other machines join."""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from parlay import models
from parlay.cache import Budget
from parlay.cache.pages import SPAN
from parlay.models.choosing import CompileRefused
from parlay.models.compiled.weights import Packed, nobody
from parlay.models.config import UnsupportedModel
from parlay.models.facts import read_facts
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import read_config
from parlay.models.lora import digest_of
from parlay.models.native import NativeRunner
from parlay.models.opening import settled
from parlay.options import SPLITS, LoadOptions, RankOptions, user_path
from parlay.ranks.follower import machine_name
from parlay.ranks.groups import make_shared_file
from parlay.ranks.layout import Hello, Layout, Plan, Wanted, build_name, core_name, decode_hello, encode
from parlay.ranks.leader import Followers, Leader, ending_of
from parlay.ranks.part import join_group
from parlay.ranks.wire import LOOK_SECONDS, SECRET, Connection, Door, Kind, listen, read_address, read_secret
from parlay.system import threads
from parlay.types import FieldError, ParlayError, Runner, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_log = logging.getLogger(__name__)

Start = Callable[[tuple[str, int], int, bytes], list[subprocess.Popen[bytes]]]
"""Starts a number of other ranks, which join at an address with a secret. Returns the child processes among them."""

ALONE = RankOptions()
"""The options for a model in one process."""


def open_target(
    model: str | PreTrainedModel,
    load: LoadOptions,
    options: RankOptions,
    budget: Budget | None,
    packed: Packed,
    *,
    longest: int | None = None,
) -> Runner:
    """Load a model in this process, or as rank 0 of several processes. Raises what `models.load` and `lead` raise.

    ``longest`` is passed to `models.load`. Several processes compute all texts with the rotary factors for short ones.
    """
    if options.ranks == 1 and options.rank_listen is not None:
        raise FieldError(
            "rank_listen",
            f"={options.rank_listen}: the model runs in one process: remove it, "
            "or set how many there are (tensor_parallel, pipeline_parallel or context_parallel)",
            *SPLITS,
        )
    if options.ranks == 1:
        return models.load(model, load, budget=budget, packed=packed, longest=longest)
    if load.runner != "auto":
        raise FieldError("runner", f"={load.runner}: it runs a model in one process: remove {options.asked}", *SPLITS)
    if not isinstance(model, str):
        raise ValueError("a model that is already loaded runs in one process: give its name or folder instead")
    if budget is not None and budget.weights is not None:
        raise FieldError(
            "memory", f"weights=SIZE is for a model in one process: remove it, or {options.asked}", *SPLITS
        )
    if load.compile:
        raise CompileRefused(model)
    return lead(model, load, options, budget=budget, packed=packed)


def end_ranks(runner: Runner) -> None:
    """End the other ranks if the runner leads any."""
    if isinstance(runner, Leader):
        runner.close()


@contextmanager
def ranks_ended_on_error(runner: Runner) -> Iterator[None]:
    """End the other ranks if the block raises."""
    try:
        yield
    except BaseException:
        end_ranks(runner)
        raise


def loss_of(runner: Runner) -> Callable[[], str]:
    """Return a function that tells why a runner is lost, or returns an empty string. It does not keep the runner
    alive."""
    if isinstance(runner, NativeRunner):
        return runner.loss
    return runner.followers.loss if isinstance(runner, Leader) else str


def lead(
    model: str,
    load: LoadOptions,
    options: RankOptions,
    *,
    cache_tokens: int | None = None,
    budget: Budget | None = None,
    packed: Packed = nobody,
    start: Start | None = None,
    span: int = SPAN,
) -> Leader:
    """Load ``model`` as rank 0 of several processes; `Leader.close` ends them. The other arguments are those of `load`.

    ``start`` starts the other ranks; None: as child processes, or not at all with ``rank_listen``. ``span``: how many
    consecutive tokens of a text one rank holds under context parallelism.

    Raises ParlayError, in one line, if not all ranks become ready; then all are ended.
    """
    layout = Layout(options.tensor_parallel, options.pipeline_parallel, options.context_parallel, span)
    try:
        layout.check(model, read_config(resolve(model)))
    except UnsupportedModel as reason:
        raise UnsupportedModel(f"{reason}; such a model runs in one process: remove {options.asked}") from None
    here = options.rank_listen is None
    start = start or (start_here if here else start_nobody)
    secret = _secret(options)
    load = _with_threads(settled(model, load), layout.ranks if here else 1)
    plan = _plan(model, load, layout, options.rank_timeout)  # reads all files, before other ranks wait for this one
    where = ("127.0.0.1", 0) if options.rank_listen is None else read_address(options.rank_listen)
    with (
        listen(where) as listener,
        closing(Door(listener, secret, options.rank_timeout)) as door,
        _ended_on_error(start(listener.getsockname()[:2], layout.ranks - 1, secret)) as children,
    ):
        wanted = Wanted(model=plan.model, digest=plan.digest, seconds=plan.seconds)
        joined = _Gathering(door, wanted, children, patient=not here).wait_for(layout.ranks - 1)
        machines = [machine_name(), *(hello.machine for _, hello in joined)]
        followers = Followers([connection for connection, _ in joined], children, options.rank_timeout)
        followers.busy = True
        try:
            # All ranks have opened the shared memory before loading, so a process that is killed later leaves no file.
            with _shared_memory(layout, machines, on_host=not plan.device.startswith("cuda")) as files:
                _send_plans(plan, joined, files, machines)
                part = join_group(replace(plan, memory=files[0]), door, None, followers.check)
                followers.joined(part)
            runner = models.load(
                model, load, cache_tokens=cache_tokens, budget=budget, packed=packed, make_forward=part
            )
            return Leader(runner, followers)
        except BaseException as error:
            followers.lose(ending_of(error))
            followers.close()
            raise


def _secret(options: RankOptions) -> bytes:
    """Return the ranks' secret: the given one, or a random one if all ranks are child processes. Raises ParlayError if
    a secret is needed and missing."""
    given = read_secret(None if options.rank_secret_file is None else Path(options.rank_secret_file))
    if options.rank_listen is None:
        return given or secrets.token_hex(32).encode()
    if not given:
        host = options.rank_listen.rpartition(":")[0]
        raise ParlayError(
            f"ranks that join at {host} must know a secret: put one into {SECRET}, or name --rank-secret-file"
        )
    return given


def _with_threads(load: LoadOptions, ranks_here: int) -> LoadOptions:
    """Divide the cores among a machine's ranks, unless the number of threads is given."""
    if load.threads is not None or ranks_here == 1:
        return load
    return replace(load, threads=max(1, threads.usual() // ranks_here))


def start_here(leader: tuple[str, int], count: int, secret: bytes) -> list[subprocess.Popen[bytes]]:
    """Start ranks as child processes, which write only to standard error, and end when this process does."""
    command = [sys.executable, "-m", "parlay", "rank", "--of-parent", "--join", f"{leader[0]}:{leader[1]}"]
    return [
        subprocess.Popen(
            command,
            env={**os.environ, SECRET: secret.decode()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for rank 0, which ends the others
        )
        for _ in range(count)
    ]


def start_nobody(leader: tuple[str, int], count: int, secret: bytes) -> list[subprocess.Popen[bytes]]:
    """Start no ranks: users start them on other machines."""
    del leader, count, secret
    return []


@contextmanager
def _ended_on_error(children: list[subprocess.Popen[bytes]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """End these processes if the block raises; they may report a reason first."""
    try:
        yield children
    except BaseException:
        until = time.monotonic() + 2
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, until - time.monotonic()))
            child.kill()
            child.wait()
        raise


class _Gathering:
    """Collects the ranks that join, and checks that each has the same model and version.

    A rank that differs is refused. If ``patient``, rank 0 then waits for another rank; otherwise the error is raised.
    """

    def __init__(
        self,
        door: Door,
        wanted: Wanted,
        children: Sequence[subprocess.Popen[bytes]],
        *,
        patient: bool,
    ) -> None:
        self._door, self._wanted, self._children = door, wanted, children
        self._patient = patient
        self._joined: dict[Connection, Hello] = {}
        self._asked: dict[Connection, Hello | None] = {}

    def wait_for(self, count: int) -> list[tuple[Connection, Hello]]:
        """Wait until ``count`` ranks have joined. If they do not join in time, the others are told, and ParlayError is
        raised."""
        seconds = self._wanted.seconds
        until = time.monotonic() + seconds
        try:
            while len(self._joined) < count:
                left = until - time.monotonic()
                if self._hear(max(0.0, min(left, 1.0))) or left > 0:  # messages that were sent in time are still read
                    continue
                start = "start them with parlay rank --join, or " if self._patient else ""
                raise ParlayError(
                    f"{len(self._joined)} of {count} other ranks have joined within {seconds:g} s: {start}allow "
                    "more with --rank-timeout"
                )
        except BaseException as error:
            for connection in [*self._joined, *self._asked]:
                connection.send_away(ending_of(error))
            raise
        chosen = list(self._joined.items())[:count]
        for connection in {*self._joined, *self._asked} - {connection for connection, _ in chosen}:
            connection.send_away(f"rank 0 needs {count} other ranks, and they have joined")
        for rank, (connection, _) in enumerate(chosen, start=1):
            connection.rank = rank
        return chosen

    def _hear(self, seconds: float) -> bool:
        """Accept a new rank, or read messages; returns whether there was anything.

        Raises ParlayError if a child process has ended.
        """
        ended = next((child for child in self._children if child.poll() is not None), None)
        if ended is not None:
            raise ParlayError(f"a process of the model ended with code {ended.returncode} before it had joined")
        for connection in [each for each in self._joined if each.has_ended(0)]:
            del self._joined[connection]
        with selectors.DefaultSelector() as selector:
            sources: list[Door | Connection] = [self._door, *self._asked]
            for source in sources:
                selector.register(source, selectors.EVENT_READ, source)
            pause = min(seconds, LOOK_SECONDS) if self._door.is_asking else seconds
            ready: list[Door | Connection] = [key.data for key, _ in selector.select(pause)]
        for each in ready:
            if isinstance(each, Connection):
                self._take(each)
        if (admitted := self._door.admit(time.monotonic() + LOOK_SECONDS * (self._door in ready))) is not None:
            self._asked[admitted] = None
            admitted.rank = len(self._joined) + len(self._asked)
        return admitted is not None or any(isinstance(each, Connection) for each in ready)

    def _take(self, connection: Connection) -> None:
        """Read a rank's next message: its greeting or, after that, whether it has the model. A rank that differs is
        refused."""
        hello = self._asked.pop(connection)
        try:
            if hello is None:
                hello = self._asked[connection] = _hello(connection)
                connection.send(Kind.MODEL, encode(self._wanted))
                return
            kind, content = connection.receive()
            if kind is not Kind.MODEL:
                raise ParlayError(content.decode(errors="replace") or f"it sent {kind.name}")
        except ParlayError as error:
            self._asked.pop(connection, None)
            connection.send_away(one_line(error))
            if not self._patient:
                raise
            _log.warning("a rank was refused, and rank 0 waits for another: %s", one_line(error))
        else:
            self._joined[connection] = hello


def _hello(connection: Connection) -> Hello:
    """Read a rank's greeting. Raises ParlayError for another version."""
    hello, own = decode_hello(connection.expect(Kind.HELLO)), build_name()
    if hello.build != own:
        raise ParlayError(
            f"the rank at {hello.host} is {hello.build}, and rank 0 {own}: run the same version on like processors"
        )
    return hello


def _plan(model: str, load: LoadOptions, layout: Layout, seconds: float) -> Plan:
    """Make the plan for all ranks, without their numbers and addresses."""
    found, lora = resolve(model), None if load.lora is None else user_path(load.lora).resolve()
    return Plan(
        rank=0,
        tensor=layout.tensor,
        stages=layout.stages,
        context=layout.context,
        span=layout.span,
        model=str(found.resolve()) if Path(model).exists() else model,
        digest=read_facts(found).digest,
        hosts=[],
        ports=[],
        memory=[],
        seconds=seconds,
        dtype=load.dtype,
        device=load.device,
        quantize=load.quantize,
        kv_cache_dtype=load.kv_cache_dtype,
        threads=load.threads,
        lora=None if lora is None else str(lora),
        adapter="" if lora is None else digest_of(lora),
    )


@contextmanager
def _shared_memory(layout: Layout, machines: Sequence[str], *, on_host: bool) -> Iterator[list[list[str]]]:
    """Yield the names of the shared files of each rank's groups. A name is empty if the group's ranks are on several
    ``machines`` or can't share memory.

    The files exist within the block; processes that have opened them keep the memory.
    """
    can_share = on_host and core_name() is not None
    files: dict[range, str] = {}
    try:
        for rank in range(layout.ranks):
            for group in layout.groups(rank):
                here = len(group) > 1 and len({machines[each] for each in group}) == 1
                if group not in files:
                    files[group] = str(make_shared_file(len(group))) if here and can_share else ""
        yield [[files[group] for group in layout.groups(rank)] for rank in range(layout.ranks)]
    finally:
        for file in filter(None, files.values()):
            Path(file).unlink(missing_ok=True)


def _send_plans(
    plan: Plan, joined: Sequence[tuple[Connection, Hello]], files: Sequence[list[str]], machines: Sequence[str]
) -> None:
    hosts, ports = ["", *(hello.host for _, hello in joined)], [0, *(hello.port for _, hello in joined)]
    for connection, _ in joined:
        own = replace(
            plan,
            rank=connection.rank,
            hosts=hosts,
            ports=ports,
            memory=files[connection.rank],
            threads=plan.threads if _is_here(hosts[connection.rank]) else None,
            device=device_of(plan.device, machines, connection.rank),
        )
        connection.send(Kind.PLAN, encode(own))


def device_of(device: str, machines: Sequence[str], rank: int) -> str:
    """Return the device of a rank. ``device`` is rank 0's; the ranks of one machine take its CUDA devices in order."""
    kind, _, first = device.partition(":")
    if kind != "cuda":
        return device
    number = machines[:rank].count(machines[rank]) + (int(first or 0) if machines[rank] == machines[0] else 0)
    return f"cuda:{number}"


def _is_here(host: str) -> bool:
    """Whether an address is a loopback address, which only this machine can reach."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
