"""Drafts that grow on a thread of their own while the engine's thread verifies others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from parlay.models.forward import GrownTree, Growth, TreeRequest
from parlay.models.native import NativeRunner
from parlay.system import threads
from parlay.types import FieldError, Segment

_Result = TypeVar("_Result")


class ThreadBeside:
    """A thread that makes one call at a time while the engine's thread decodes.

    A call computes on ``threads`` threads, and decoding has that many fewer until it returns. The thread begins with
    the first call and ends with `close`.
    """

    def __init__(self, lent: int = 0) -> None:
        """Lend ``lent`` threads to its calls. Raises ValueError if no thread would be left for decoding, unless there
        is only one."""
        if lent >= threads.count() > 1:
            raise FieldError(
                "threads",
                f"={lent} leaves none of {threads.count()} to the target: give it {threads.count() - 1} at most",
            )
        self.threads = lent
        self._made: tuple[int, ThreadPoolExecutor] | None = None

    def begin(self, call: Callable[[], _Result]) -> Future[_Result]:
        """Start the call in the thread. The future gets what it returns or raises."""
        if self._made is None or self._made[0] != os.getpid():  # a forked process has none of its parent's threads
            self._made = os.getpid(), ThreadPoolExecutor(1, "parlay-beside")
        threads.lend(self.threads)
        try:
            return self._made[1].submit(self._make, call)
        except BaseException:
            threads.take_back(self.threads)
            raise

    def _make(self, call: Callable[[], _Result]) -> _Result:
        try:
            return call()
        finally:
            threads.take_back(self.threads)

    def close(self) -> None:
        """Wait for the call under way, and end the thread."""
        if self._made is not None and self._made[0] == os.getpid():
            self._made[1].shutdown()
        self._made = None


class GrowthBeside:
    """Chains and trees of a draft model that grow on another thread.

    The thread that made this object calls `end`. So does the model's store before it gives the model's memory to
    others.
    """

    def __init__(
        self,
        runner: NativeRunner,
        texts: Sequence[Segment],
        growth: Growth,
        requests: Sequence[TreeRequest],
        *,
        beside: ThreadBeside,
        ended: Callable[[list[GrownTree] | Exception], None],
    ) -> None:
        """The arguments are those of `NativeRunner.grow`. ``ended`` is called once with the grown drafts (or the
        error), when the rows that ran can be kept."""
        self._runner, self._texts, self._ended = runner, texts, ended
        self.seconds = 0.0
        """How long the drafts took to grow; set when they are there."""
        self._call = runner.growing(texts, growth, requests, max(1, beside.threads))
        self._growing: Future[list[GrownTree]] | None = beside.begin(self._grow)
        runner.store.beside = self

    def _grow(self) -> list[GrownTree]:
        began = time.perf_counter()
        grown = self._call.run()
        self.seconds = time.perf_counter() - began
        return grown

    def end(self, *, stop: bool = False) -> None:
        """Wait for the drafts and hand them to ``ended``; with ``stop`` they grow no further level. Later calls do
        nothing."""
        growing = self._growing
        if growing is None:
            return
        if stop:
            self._call.stop()
        failed: Exception | None = None
        try:
            grown = growing.result()
        except Exception as error:
            failed = error
        # Only now: if this thread was interrupted while it waited, the other one is still at work.
        self._growing = self._runner.store.beside = None
        if failed is not None:
            self._ended(failed)
            return
        self._runner.restage(self._texts, grown)
        self._ended(grown)
