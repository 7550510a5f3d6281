"""Carries a job's events from the engine thread, through one event loop, to the job's reader."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from parlay.llm.jobs import Job
from parlay.llm.outputs import RequestOutput, StreamEvent, joined
from parlay.types import ParlayError, kind_and_message

BETWEEN_SECONDS = 0.01
"""Seconds between two deliveries of tokens if steps are quicker than this. Waking the loop and writing to a client
takes a quarter of a millisecond of a core that the decoder could use, and a reader does not notice a delay of 10 ms."""
Message = StreamEvent | Exception | None
"""An event; or the error that ended the job; or None, which comes first and says that the engine has accepted the
job."""


class Closed(ParlayError):
    """The service takes no more requests: it is shutting down or closed."""

    def __init__(self, message: str = "the service has been closed: it takes no more requests") -> None:
        super().__init__(message)


class Lost(Closed):
    """The service takes no more requests because its model is gone; the message says why."""


class Busy(ParlayError):
    """Too many requests wait: try again later."""


class JobQueue:
    """The messages of one job. Only the event loop in which it was made calls its methods.

    Every message sets ``wake_event``. The queues of one reader may share one event.
    """

    def __init__(self, wake_event: asyncio.Event | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.wake_event = wake_event or asyncio.Event()
        self.taken: asyncio.Future[None] = self.loop.create_future()
        self.over: asyncio.Future[None] = self.loop.create_future()
        """Done when the job is over. Wait for it under `asyncio.shield`, because other tasks wait for the same
        future."""
        self.error: Exception | None = None
        self.events: deque[StreamEvent] = deque()
        """Events that have not been read."""

    def put(self, message: Message) -> None:
        if isinstance(message, StreamEvent):
            self.events.append(message)
            if message.output is not None:
                self._end()
        elif message is not None:
            self._fail(message)
        elif not self.taken.done():
            self.taken.set_result(None)
        self.wake_event.set()

    def _fail(self, error: Exception) -> None:
        self.error = error
        if not self.taken.done():
            self.taken.set_exception(error)
        self._end()

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


@dataclass(slots=True, eq=False)
class PendingJob:
    """A job on its way through the engine thread. ``deadline`` is a time of `time.monotonic`."""

    job: Job
    whole: bool
    """Whether only the finished output is wanted, without messages before it."""
    deadline: float | None
    queue: JobQueue
    timed_out: bool = False
    fresh: bool = True
    """Whether none of the job's text has been sent yet."""


class OutputQueue:
    """Messages for the jobs of one event loop, in order.

    If steps take longer than `BETWEEN_SECONDS`, the engine thread wakes the loop after each step. If steps are quicker,
    a timer of the loop delivers the messages every `BETWEEN_SECONDS` until none is left. Urgent messages always wake
    the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._messages: deque[tuple[PendingJob, Message]] = deque()
        self._urgent = False  # used by the engine thread alone
        self._coming = False  # the loop has been woken, or its timer is set, so it will call `_deliver`
        self._timer: asyncio.TimerHandle | None = None
        self._last = -math.inf

    def put(self, job: PendingJob, message: Message, *, urgent: bool) -> None:
        """Queue a message. The engine thread calls `wake` after the last message of a step."""
        self._messages.append((job, message))
        self._urgent = self._urgent or urgent

    def wake(self) -> None:
        """Wake the loop if necessary. Raises RuntimeError if the loop is closed while messages wait."""
        if self._messages and (self._urgent or not self._coming or self._loop.is_closed()):
            self._urgent, self._coming = False, True
            self._loop.call_soon_threadsafe(self._deliver, False)

    @property
    def waiting(self) -> set[PendingJob]:
        """The jobs with messages in the queue."""
        return {job for job, _ in self._messages}

    def _deliver(self, timed: bool) -> None:
        """Deliver all messages; runs in the loop. A message that the engine thread queues meanwhile is either delivered
        in this call, or its `wake` finds ``_coming`` unset and wakes the loop again."""
        self._coming = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now, found = self._loop.time(), False
        while self._messages:
            job, message = self._messages.popleft()
            job.queue.put(message)
            found = True
        if found and (timed or now - self._last < BETWEEN_SECONDS):
            self._coming = True
            self._timer = self._loop.call_later(BETWEEN_SECONDS, self._deliver, True)
        self._last = now


class Writes(Protocol):
    """The writer of a job's text: the engine thread, or a task that submits the text in parts to that thread."""

    def abort(self, pending: PendingJob) -> None:
        """End the job within one engine step; a sample that has finished stays as it is."""
        ...


class JobStream(AsyncIterator[StreamEvent]):
    """The events of all samples of a job, interleaved, for one reader in the event loop that submitted the job.

    The job ends within one engine step if the reading task is cancelled while it waits for an event, if the stream is
    closed, or if the stream is garbage-collected.
    """

    def __init__(self, worker: Writes, pending: PendingJob) -> None:
        self._worker = worker
        self._pending = pending

    async def __anext__(self) -> StreamEvent:
        queue = self._pending.queue
        while not queue.events:
            if queue.over.done():
                raise queue.error or StopAsyncIteration
            queue.wake_event.clear()
            try:
                await queue.wake_event.wait()
            except asyncio.CancelledError:
                self._worker.abort(self._pending)
                raise
        return queue.events.popleft()

    def take(self) -> list[StreamEvent]:
        """Return the unread events, joined into one event for each sample."""
        events = self._pending.queue.events
        taken = joined(events)
        events.clear()
        return taken

    @property
    def error(self) -> Exception | None:
        """The error that ended the job without an output; no event follows it."""
        return self._pending.queue.error

    async def wait(self) -> RequestOutput:
        """Wait until the job has ended, without reading its events, and return the whole output. Cancelling the wait
        ends the job."""
        try:
            await asyncio.shield(self._pending.queue.over)
        except asyncio.CancelledError:
            self._worker.abort(self._pending)
            raise
        return self.output

    async def aclose(self) -> None:
        """End the job now; `output` then has the text so far. A job that is over is left as it is."""
        queue = self._pending.queue
        if not queue.over.done():
            self._worker.abort(self._pending)
            await asyncio.shield(queue.over)
        queue.events.clear()

    @property
    def output(self) -> RequestOutput:
        """The whole result, or the text so far of a job that was ended. Raises ParlayError while the job is under
        way."""
        queue = self._pending.queue
        if not queue.over.done():
            raise ParlayError("the stream is under way: iterate to its end, or close it, before asking for its output")
        if queue.error is not None:
            raise queue.error
        return self._pending.job.output()

    @property
    def timed_out(self) -> bool:
        """Whether the time limit ended the job; its samples then have the finish reason ``abort``."""
        return self._pending.timed_out

    def __del__(self) -> None:
        if not self._pending.queue.over.done():
            self._worker.abort(self._pending)


def for_future(error: BaseException) -> Exception:
    """Turn an error into an exception that futures and event loops accept.

    Other libraries may raise errors that are no `Exception`: SystemExit, or the panic of a library in Rust.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return ParlayError(kind_and_message(error))
