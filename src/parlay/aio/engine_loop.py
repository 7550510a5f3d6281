"""The engine thread, the only thread that touches the engine. Between steps it makes the calls that other threads have
queued."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch

from parlay.aio.building import StrategyBuilds
from parlay.aio.stream import Busy, Closed, Lost, Message, OutputQueue, PendingJob, for_future
from parlay.llm.jobs import Sample
from parlay.llm.llm import LLM
from parlay.llm.outputs import StreamEvent
from parlay.system import threads
from parlay.types import EngineStats, Event, FinishReason, ParlayError, RunnerLost, kind_and_message

logger = logging.getLogger(__name__)

T = TypeVar("T")

_IDLE_SECONDS = 1.0  # after this long without a request, ``when_idle`` is called
_WAITING_SECONDS = 0.001  # pause between steps while no sequence can run
_STALE_SECONDS = 0.05  # how old the statistics may be while the same samples decode


class EngineThread:
    """The thread that loads a model and runs it. One thread does both, because torch keeps a pool of threads for each
    thread that computes."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="parlay-engine", daemon=True).start()

    @classmethod
    def once(cls, function: Callable[[], T]) -> Future[T]:
        """Run one call in a new daemon thread; the future gets its result."""
        thread = cls()
        future = thread.call(function)
        thread.end()
        return future

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Queue a call for the thread; the future gets what it returns or raises."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(run)
        return future

    def last(self, function: Callable[[], None]) -> None:
        """Queue a last call, and end the thread after it."""
        self._calls.put(function)
        self.end()

    def end(self) -> None:
        """End the thread after the calls that are queued."""
        self._calls.put(None)

    def _run(self) -> None:
        torch.set_num_threads(threads.count())  # a new thread starts with torch's own default
        while (function := self._calls.get()) is not None:
            function()


@contextmanager
def _logged(message: str) -> Iterator[None]:
    """Log an exception in the block, whose work no request asked for, and go on."""
    try:
        yield
    except BaseException:
        logger.exception(message)


class Worker:
    """Decodes all jobs together in one thread. Any thread may call the public methods, and none of them blocks."""

    def __init__(
        self, llm: LLM, max_waiting: int, thread: EngineThread, when_idle: Callable[[LLM], None] | None = None
    ) -> None:
        self._llm, self._when_idle = llm, when_idle
        self._engine = llm.engine
        self.capacity = self._engine.limits.max_sequences + max_waiting
        self._stats = self._engine.stats()
        self._lock = threading.Lock()
        self._refusal: Callable[[], Closed] | None = None
        """Makes the error that refuses new requests; None while requests are accepted."""
        self._under_way = 0
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._done: Future[None] = Future()
        self._builds = StrategyBuilds(llm, EngineThread.once, partial(self._inbox.put, _go_on))
        # Only the engine thread uses the attributes below.
        self._samples: dict[str, tuple[PendingJob, Sample]] = {}  # by request id
        self._deadlines: dict[PendingJob, float] = {}
        self._queues: dict[asyncio.AbstractEventLoop, OutputQueue] = {}
        self._voting: set[PendingJob] = set()
        """Jobs with a vote, some of whose samples have ended since the last check."""
        self._until: float | None = None
        self._stats_due = 0.0
        thread.last(self._run)

    # --------------------------------------------------------------------------------------------------- any thread

    @property
    def closing(self) -> bool:
        return self._refusal is not None

    @property
    def stats(self) -> EngineStats:
        """The engine's counts, in which the jobs that this worker has not yet given to the engine count as waiting."""
        stats = self._stats
        return replace(stats, waiting=max(0, self._under_way - stats.running))

    def submit(self, pending: PendingJob) -> None:
        """Queue a job. All its messages, such as events and errors, go to the job's queue. Raises Closed or Busy."""
        count = len(pending.job.samples)
        with self._lock:
            self.require_open()
            if self._under_way and self._under_way + count > self.capacity:
                raise Busy(f"{self._under_way} requests are under way and no more may wait: try again later")
            self._under_way += count
            self._inbox.put(lambda: self._add(pending))

    def abort(self, pending: PendingJob) -> None:
        """End a job within one step; a sample that has finished stays as it is. The garbage collector may call this."""
        self._inbox.put(lambda: self._abort(pending))

    def call(self, function: Callable[[], None]) -> None:
        """Queue a function for the engine thread, which calls it between two steps; it must not raise. Raises
        Closed."""
        with self._lock:
            self.require_open()
            self._inbox.put(function)

    def close(self, drain_seconds: float | None) -> Future[None]:
        """Refuse new jobs, let those under way finish for ``drain_seconds``, then abort them; the future is done at the
        end."""
        until = math.inf if drain_seconds is None else time.monotonic() + drain_seconds
        with self._lock:
            self._refusal = self._refusal or Closed
            self._inbox.put(lambda: self._drain(until))
        return self._done

    def require_open(self) -> None:
        """Raises Closed after `close`, and Lost if the model is gone."""
        if self._refusal is not None:
            raise self._refusal()

    # ------------------------------------------------------------------------------------------------ engine thread

    def _run(self) -> None:
        failure: str | None = None
        try:
            while self._until is None or ((self._samples or self._builds.holding) and time.monotonic() < self._until):
                self._make_calls()
                self._add_held()
                self._expire()
                if self._samples:
                    self._step()
                self._vote()
                self._count()
                self._deliver()
        except RunnerLost as error:
            failure = str(error)
            logger.error("the model is gone, and all its requests end: %s", failure)
        except BaseException as error:  # if the thread died silently, every job would wait forever
            failure = f"the engine failed ({kind_and_message(error)})"
            logger.exception("the engine thread failed; all requests end")
        self._end(failure)

    def _make_calls(self) -> None:
        """Make the calls that are in the inbox. If no job is under way, wait for a call first.

        Calls that arrive meanwhile wait until after the next step. Otherwise a caller that queues one call after
        another would delay the step.
        """
        if not self._samples and self._until is None:
            self._next_call()()
            self._stats_due = 0.0
        elif not self._samples:
            time.sleep(_WAITING_SECONDS)
        for _ in range(self._inbox.qsize()):
            self._inbox.get()()
            self._stats_due = 0.0

    def _next_call(self) -> Callable[[], None]:
        """Wait for a call, and return it. ``when_idle`` is called in the first pause of `_IDLE_SECONDS` without a
        call."""
        if self._when_idle is not None:
            try:
                return self._inbox.get(timeout=_IDLE_SECONDS)
            except Empty:
                when_idle, self._when_idle = self._when_idle, None
                with _logged("work put off to a pause failed; requests that need it try again"):
                    when_idle(self._llm)
        return self._inbox.get()

    def _count(self) -> None:
        """Read the statistics when a sample has started or ended, and otherwise every `_STALE_SECONDS`. Reading them in
        every step would cost too much."""
        now = time.monotonic()
        if now >= self._stats_due:
            self._stats = self._engine.stats()
            self._stats_due = now + _STALE_SECONDS

    def _add(self, pending: PendingJob) -> None:
        try:
            if self._builds.hold(pending):
                return
            self._llm.add(pending.job)
        except BaseException as error:
            return self._refuse(pending, error)
        self._samples.update({sample.request.id: (pending, sample) for sample in pending.job.samples})
        if pending.deadline is not None:
            self._deadlines[pending] = pending.deadline
        self._post(pending, None)

    def _refuse(self, pending: PendingJob, error: BaseException) -> None:
        self._leave(len(pending.job.samples))
        self._post(pending, for_future(error))

    def _add_held(self) -> None:
        """Add the jobs whose strategy is now built; if the build failed, refuse them with its error."""
        built, error = self._builds.take()
        for pending in built:
            if error is None:
                self._add(pending)
            else:
                self._refuse(pending, error)

    def _abort(self, pending: PendingJob) -> None:
        if self._builds.leave(pending):
            return self._leave(len(pending.job.samples))
        for sample in pending.job.samples:
            self._stop(sample.request.id)

    def _drain(self, until: float) -> None:
        self._until = min(until, math.inf if self._until is None else self._until)

    def _expire(self) -> None:
        if not self._deadlines:
            return
        now = time.monotonic()
        for pending in [pending for pending, deadline in self._deadlines.items() if deadline <= now]:
            pending.timed_out = True
            self._abort(pending)

    def _step(self) -> None:
        try:
            events = self._engine.step()
        except RunnerLost:
            raise
        except BaseException as error:
            logger.exception("a step of the engine failed; the requests in it end, the engine goes on")
            self._fail_running(f"the engine failed while this request was running ({kind_and_message(error)})")
            return
        for event in events:
            self._send(event)
        if not events:  # all sequences wait for memory that calls between steps hold
            time.sleep(_WAITING_SECONDS)

    def _vote(self) -> None:
        """For each job with a vote: start the samples that the vote still needs, or abort the rest once the vote is
        decided."""
        while self._voting:
            pending = self._voting.pop()
            vote = pending.job.vote
            if vote is None or not any(sample.request.id in self._samples for sample in pending.job.samples):
                continue
            if vote.over:
                self._abort(pending)
                continue
            try:
                self._llm.add(pending.job)
            except BaseException as error:
                self._break(pending, for_future(error))

    def _fail_running(self, failure: str) -> None:
        """End the running requests with an error. If none was running, end the waiting requests, because the next step
        would fail, too."""
        running = [sequence.request.id for sequence in self._engine.scheduler.running]
        for name in running or list(self._samples):
            self._stop(name, failure)

    def _stop(self, name: str, failure: str | None = None) -> None:
        """End one sample now, with ``failure`` as its error, or as aborted if there is none."""
        if name not in self._samples:
            return
        reason: FinishReason = "abort" if failure is None else "error"
        event = self._withdraw(name, reason, failure)
        self._send(event or self._samples[name][1].unknown(reason, failure))

    def _withdraw(self, name: str, reason: FinishReason, failure: str | None) -> Event | None:
        try:
            return self._engine.abort(name, reason, failure)
        except BaseException:
            logger.exception("ending request %s failed; it is dropped", name)
            return None

    def _send(self, event: Event) -> None:
        """Turn an engine event into text for its job's consumer. An exception here ends this job alone."""
        if event.request not in self._samples:
            return
        pending, sample = self._samples[event.request]
        if event.finish_reason is not None:
            del self._samples[event.request]
            self._leave(1)
            self._stats_due = 0.0
            if pending.job.vote is not None:
                self._voting.add(pending)
        try:
            news = pending.job.event(sample, event)
        except BaseException as error:
            logger.exception("request %s ends: its output can't be made into text", event.request)
            self._break(pending, ParlayError(f"the output can't be made into text ({kind_and_message(error)})"))
            return
        if news.output is not None:
            self._deadlines.pop(pending, None)
        if news.output is not None or (not pending.whole and (news.token_ids or news.finish_reason is not None)):
            self._post(pending, news)

    def _break(self, pending: PendingJob, error: Exception) -> None:
        """End a job with an error and no output."""
        self._stats_due = 0.0
        self._deadlines.pop(pending, None)
        for sample in pending.job.samples:
            if self._samples.pop(sample.request.id, None) is not None:
                self._leave(1)
                self._withdraw(sample.request.id, "error", str(error))
        self._post(pending, error)

    def _leave(self, count: int) -> None:
        with self._lock:
            self._under_way -= count

    def _post(self, pending: PendingJob, message: Message) -> None:
        """Put a message into the job's queue. Every message is urgent, except an event that only continues a text whose
        first piece was sent."""
        loop = pending.queue.loop
        outputs = self._queues.get(loop)
        if outputs is None:
            outputs = self._queues[loop] = OutputQueue(loop)
        goes_on = isinstance(message, StreamEvent) and message.output is None and not pending.fresh
        outputs.put(pending, message, urgent=not goes_on)
        pending.fresh = pending.fresh and not isinstance(message, StreamEvent)

    def _deliver(self) -> None:
        """Wake each event loop at most once, however many of its jobs have messages."""
        for outputs in self._queues.values():
            try:
                outputs.wake()
            except RuntimeError:  # the loop is closed, so nobody reads
                for pending in outputs.waiting:
                    self._abort(pending)
        if not self._samples:
            self._queues.clear()  # event loops come and go

    def _end(self, failure: str | None) -> None:
        refusal = Closed if failure is None else partial(Lost, failure)
        with self._lock:
            self._refusal = refusal
        for pending in self._builds.refuse(refusal):
            self._refuse(pending, refusal())
        while not self._inbox.empty():
            self._inbox.get()()
        for name in list(self._samples):
            self._stop(name, failure)
        with _logged("the last statistics can't be read"):
            self._stats = self._engine.stats()
        self._deliver()
        try:
            with ExitStack() as closing:
                closing.callback(self._llm.close)
                self._builds.close()
        except BaseException as error:
            self._done.set_exception(for_future(error))
        else:
            self._done.set_result(None)


def _go_on() -> None:
    """Do nothing. As a queued call, it wakes the engine thread, which then looks for other work."""
