"""Rank 0: a runner for the engine, drafters and server, whose calls the other ranks repeat."""

from __future__ import annotations

import logging
import selectors
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from parlay.models.config import UnsupportedModel
from parlay.models.lora_layout import BadAdapter
from parlay.models.native import NativeRunner
from parlay.models.wrapped_runner import WrappedRunner
from parlay.ranks.adapters import AdapterBook
from parlay.ranks.calls import Call, CallLog
from parlay.ranks.follower import BEATS
from parlay.ranks.layout import AdapterOrder, decode_adapter_answer, encode
from parlay.ranks.part import RankPart
from parlay.ranks.wire import Connection, Kind
from parlay.types import (
    NO_SKIP,
    Adapter,
    Exactness,
    Finish,
    Output,
    Runner,
    RunnerLost,
    RunnerSpec,
    Segment,
    Skip,
    one_line,
)

_log = logging.getLogger(__name__)
_LAST_SECONDS = 5.0
"""How many seconds child processes get to end by themselves when the ranks are closed."""


class Followers:
    """The other ranks, as rank 0 sees them. A thread receives their messages. If one rank is lost, all are ended.

    ``busy``: a caller waits for a forward, and will get the error of a lost rank.
    """

    def __init__(self, connections: Sequence[Connection], children: Sequence[subprocess.Popen[bytes]], seconds: float):
        self._connections, self.children, self._seconds = connections, children, seconds
        self._part: RankPart | None = None
        self._heard = dict.fromkeys(connections, time.monotonic())
        self._changed = threading.Condition()
        self._joined: set[int] = set()
        self._exactness: dict[int, Exactness] = {}
        self._answers: dict[int, dict[int, str]] = {}
        self._reason, self._over = "", False
        self.busy = False
        threading.Thread(target=self._watch, name="parlay-ranks", daemon=True).start()

    def joined(self, part: RankPart) -> None:
        """Wait until all ranks have joined. If a rank is lost, now or later, waits in ``part`` end.

        Raises RunnerLost if a rank ends before it has joined. Errors of loading, which come later, are not awaited
        here: they are likely to occur in this process, too.
        """
        self._part = part
        with self._changed:
            self._changed.wait_for(lambda: self._reason or self._over or len(self._joined) == len(self._connections))
            missing = len(self._joined) < len(self._connections)
        if missing:
            self.check()

    def loss(self) -> str:
        """Return why a rank is lost; empty if none is. Any thread may call this."""
        return self._reason

    def silence(self) -> str:
        """Return a message about the rank that has been silent longest, if it has been silent for half the timeout;
        else an empty string. Other ranks that report an error may only be waiting for this one."""
        connection = min(self._heard, key=self._heard.__getitem__)
        silent = time.monotonic() - self._heard[connection] > self._seconds / 2
        return f"rank {connection.rank} has not done its part of a forward within {self._seconds:g} s" if silent else ""

    def check(self) -> None:
        """Raise RunnerLost if a rank is lost or the ranks are closed."""
        if self._reason or self._over:
            raise RunnerLost(self._reason or "the ranks of this model have been closed")

    def ready(self) -> Exactness:
        """Wait until all ranks have loaded their parts; returns the weakest of their exactness levels. Raises
        RunnerLost if one is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._reason or len(self._exactness) == len(self._connections))
        self.check()
        return Exactness.weakest(*self._exactness.values())

    def read_adapter(self, order: AdapterOrder) -> None:
        """Have all ranks read an adapter, and wait for them. Raises BadAdapter if one of them can't; all then go on
        without the adapter."""
        with self._changed:
            answers = self._answers[order.number] = {}
        try:
            self.send(Kind.ADAPTER, encode(order))
            with self._changed:
                self._changed.wait_for(
                    lambda: self._reason or self._over or len(answers) == len(self._connections), self._seconds
                )
        finally:
            with self._changed:
                del self._answers[order.number]
        self.check()
        if len(answers) < len(self._connections):
            late = min({each.rank for each in self._connections} - answers.keys())
            raise BadAdapter(f"rank {late} has not read the adapter in {order.folder} within {self._seconds:g} s")
        if refusals := [f"rank {rank}: {reason}" for rank, reason in sorted(answers.items()) if reason]:
            raise BadAdapter(refusals[0])

    def send(self, kind: Kind, content: bytes = b"") -> None:
        """Send a frame to all ranks. Raises RunnerLost if that fails; then all ranks are ended."""
        self.check()
        try:
            for connection in self._connections:
                connection.send(kind, content)
        except BaseException as error:  # an interrupted frame can't be continued
            self.lose(ending_of(error))
            raise

    def lose(self, reason: str) -> None:
        """End all ranks for this reason, unless they are ending already."""
        with self._changed:
            if self._reason or self._over:
                return
            self._reason = reason
            self._changed.notify_all()
        if not self.busy:  # otherwise the caller that waits for the forward gets the error
            _log.error("all ranks of the model end: %s", reason)
        self._stop(reason)

    def close(self) -> None:
        """End all ranks after the work is done, and wait for the ranks that are child processes."""
        with self._changed:
            ends, self._over = not self._over and not self._reason, True
            self._changed.notify_all()
        if ends:
            self._stop("")
        until = time.monotonic() + _LAST_SECONDS
        for child in self.children:
            try:
                child.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for connection in self._connections:
            connection.close()

    def _stop(self, reason: str) -> None:
        if self._part is not None and reason:
            self._part.give_up()
        for connection in self._connections:
            with suppress(RunnerLost):
                connection.send(Kind.STOP, reason.encode())
        for connection in self._connections:
            connection.close_softly()
        if self._part is not None:
            self._part.give_up()

    def _watch(self) -> None:
        """Receive messages and send heartbeats until the ranks end."""
        try:
            self._hear_all()
        except (OSError, ValueError) as error:  # a connection is closed
            if not self._over:
                self.lose(one_line(error))

    def _hear_all(self) -> None:
        pause = self._seconds / BEATS
        with selectors.DefaultSelector() as selector:
            for connection in self._connections:
                selector.register(connection, selectors.EVENT_READ, connection)
            due = time.monotonic()
            while not self._reason and not self._over:
                try:
                    for key, _ in selector.select(pause):
                        self._hear(key.data)
                    if time.monotonic() >= due:
                        self._beat()
                        due = time.monotonic() + pause
                except RunnerLost as error:
                    self.lose(one_line(error))

    def _hear(self, connection: Connection) -> None:
        kind, content = connection.receive()
        self._heard[connection] = time.monotonic()
        if kind is Kind.FAILED:
            self.lose(self.silence() or f"rank {connection.rank}: {content.decode(errors='replace')}")
        elif kind is Kind.JOINED:
            with self._changed:
                self._joined.add(connection.rank)
                self._changed.notify_all()
        elif kind is Kind.ADAPTER:
            answer = decode_adapter_answer(content)
            with self._changed:
                self._answers.get(answer.number, {})[connection.rank] = answer.reason
                self._changed.notify_all()
        elif kind is Kind.READY:
            text = content.decode(errors="replace")
            if text not in {*Exactness}:
                raise RunnerLost(
                    f"rank {connection.rank} is ready in a way that is not known: are the versions the same?"
                )
            with self._changed:
                self._exactness[connection.rank] = Exactness(text)
                self._changed.notify_all()

    def _beat(self) -> None:
        for connection in self._connections:
            if time.monotonic() - self._heard[connection] > self._seconds:
                raise RunnerLost(f"rank {connection.rank} has said nothing for {self._seconds:g} s")
            connection.send(Kind.BEAT)


class Leader(WrappedRunner):
    """A runner that logs its calls and sends them with the next forward. The other ranks repeat them in `follow`. It
    waits for no answers.

    An error of a forward in its own runner is raised before any exchange with other ranks, and on all ranks alike. With
    stages, several forwards may be under way; the other ranks repeat them, and the calls between them, in the same
    order.
    """

    def __init__(self, inner: Runner, followers: Followers) -> None:
        """``followers`` must be ready."""
        super().__init__(inner)
        self.followers, self._log, self._under_way = followers, CallLog(), 0
        self._adapters = AdapterBook(inner.spec.name, followers)
        self._spec = replace(inner.spec, exactness=Exactness.weakest(inner.spec.exactness, followers.ready()))
        followers.send(Kind.START, str(inner.capacity()).encode())
        followers.busy = False
        self.close = weakref.finalize(self, followers.close)

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def read_adapter(self, folder: Path, name: str) -> Adapter:
        """Have all ranks read their parts of the adapter in a folder. Any thread may call this.

        Raises BadAdapter if one of them can't, in which case no rank uses the adapter, and RunnerLost.
        """
        if not isinstance(self._inner, NativeRunner):
            raise UnsupportedModel(f"{self.spec.name} runs no adapters here: merge one at load (--lora)")
        adapter = self._inner.read_adapter(folder, name)
        self._adapters.share(folder, adapter)
        return adapter

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        cached = self._inner.open(sequence, tokens, salt)
        self._log.open(sequence, tokens, salt, cached)
        return cached

    def reserve(self, sequence: int, tokens: int) -> bool:
        has_room = self._inner.reserve(sequence, tokens)
        if has_room:
            self._log.add(Call.RESERVE, sequence, tokens)
        return has_room

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        return self.begin(segments, taps, skip)()

    def begin(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Finish:
        if any(segment.features is not None for segment in segments):
            raise ValueError(f"{self.spec.name}: several processes run it, and rows with features run in one alone")
        for number in self._adapters.forgotten():
            self._log.add(Call.FORGET, number)
        self._log.forward(segments, taps, skip, self._adapters.number)
        with self._all_or_none():
            self.followers.send(Kind.CALLS, self._log.take())
            try:
                finish = self._inner.begin(segments, taps, skip)
            except ValueError:
                self._log.add(Call.REFUSED)
                raise
            self._under_way += 1
        return partial(self._finish, finish)

    def _finish(self, finish: Finish) -> Output:
        self._under_way -= 1
        with self._all_or_none():
            return finish()

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Context manager for forwards: if a rank is lost or rank 0 fails inside, all ranks end, because their states
        would differ from then on."""
        self.followers.busy = True
        try:
            yield
        except ValueError:
            raise
        except RunnerLost as error:
            self.followers.lose(self.followers.silence() or one_line(error))
            self.followers.check()
            raise
        except BaseException as error:
            self.followers.lose(ending_of(error, "rank 0 failed: "))
            raise
        finally:
            self.followers.busy = self._under_way > 0

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        cached = self._inner.keep(sequence, path)
        self._log.keep(sequence, path, cached)
        return cached

    def truncate(self, sequence: int, length: int) -> int:
        cached = self._inner.truncate(sequence, length)
        self._log.add(Call.TRUNCATE, sequence, length, cached)
        return cached

    def fork(self, sequence: int, copy: int) -> None:
        self._inner.fork(sequence, copy)
        self._log.add(Call.FORK, sequence, copy)

    def release(self, sequence: int) -> None:
        self._inner.release(sequence)
        self._log.add(Call.RELEASE, sequence)


def adapter_reader(runner: Runner) -> Callable[[Path, str], Adapter] | None:
    """Return the function that reads an adapter from a folder for this runner's rows; None if the runner supports no
    adapters."""
    return runner.read_adapter if isinstance(runner, NativeRunner | Leader) else None


def ending_of(error: BaseException, before: str = "") -> str:
    """Return the reason that other ranks get when rank 0 ends: ``before`` and the error, or only that it ended after an
    interrupt."""
    return "rank 0 has ended" if isinstance(error, KeyboardInterrupt) else before + one_line(error)
