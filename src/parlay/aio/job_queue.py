"""Where the engine thread leaves what becomes of a job, and the job's consumer picks it up in its own event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from parlay.llm.jobs import Job
from parlay.llm.outputs import StreamEvent
from parlay.types import ParlayError

Message = StreamEvent | Exception | None
"""Something new; why there is nothing or nothing more; or, first of all, that the engine has taken the job."""


class Closed(ParlayError):
    """The service is shutting down, or has."""


class Busy(ParlayError):
    """So many requests wait that this one may not: try again later."""


class JobQueue:
    """One job's messages. It belongs to the event loop that it is made in, and so does every call but `PendingJob`'s.

    ``wake_event`` is set by whatever comes. Job queues with one reader may share it.
    """

    def __init__(self, wake_event: asyncio.Event | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.wake_event = wake_event or asyncio.Event()
        self.taken: asyncio.Future[None] = self.loop.create_future()
        self.over: asyncio.Future[None] = self.loop.create_future()
        """Wait for it under `asyncio.shield`: others do too."""
        self.error: Exception | None = None
        self.events: deque[StreamEvent] = deque()
        """Those that have not been read."""

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
    """Only the finished output is wanted: no message before the last."""
    deadline: float | None
    queue: JobQueue
    timed_out: bool = False
    fresh: bool = True
    """Nothing of its text has been sent yet."""
