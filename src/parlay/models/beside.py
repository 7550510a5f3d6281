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
from parlay.types import Segment

_Result = TypeVar("_Result")


class ThreadBeside:
    """A thread that makes one call at a time while the one that decodes goes on.

    A call computes on ``threads`` threads, and decoding does without as many until it returns. The thread begins with
    the first call and ends with `close`.
    """

    def __init__(self, lent: int = 0) -> None:
        """Lend it that many threads. Raises ValueError where they are all that decode, unless there is one alone."""
        if lent >= threads.count() > 1:
            raise ValueError(
                f"threads={lent} leaves none of {threads.count()} to the target: give it {threads.count() - 1} at most"
            )
        self.threads = lent
        self._made: tuple[int, ThreadPoolExecutor] | None = None

    def begin(self, call: Callable[[], _Result]) -> Future[_Result]:
        """Make the call there. Its future has what it returns or raises."""
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
        """Wait for the call that is being made, and end the thread."""
        if self._made is not None and self._made[0] == os.getpid():
            self._made[1].shutdown()
        self._made = None


class GrowthBeside:
    """Chains and trees of a draft model that grow on another thread.

    The thread that made this one calls `end`. The model's store calls it, too, before its memory is given to others.
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
        """See `NativeRunner.grow`. ``ended`` takes what has grown, once, when the rows that ran can be kept."""
        self._runner, self._texts, self._ended = runner, texts, ended
        self.seconds = 0.0
        """How long they have grown, once they are there."""
        self._call = runner.growing(texts, growth, requests, max(1, beside.threads))
        self._growing: Future[list[GrownTree]] | None = beside.begin(self._grow)
        runner.store.beside = self

    def _grow(self) -> list[GrownTree]:
        began = time.perf_counter()
        grown = self._call.run()
        self.seconds = time.perf_counter() - began
        return grown

    def end(self, *, stop: bool = False) -> None:
        """Wait for the drafts and hand them on; with ``stop`` they grow no further level. Later calls do nothing."""
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
        # Not before: whoever interrupts this thread leaves the other one at work.
        self._growing = self._runner.store.beside = None
        if failed is not None:
            self._ended(failed)
            return
        self._runner.restage(self._texts, grown)
        self._ended(grown)
