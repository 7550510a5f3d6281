"""One job's events as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from parlay.aio.job_queue import PendingJob
from parlay.llm.outputs import RequestOutput, StreamEvent, joined
from parlay.types import ParlayError


class Writes(Protocol):
    """Whoever writes a job's text: the engine thread, or a task that asks it for parts."""

    def abort(self, pending: PendingJob) -> None:
        """End the job within one engine step; what is over stays as it is."""
        ...


class JobStream(AsyncIterator[StreamEvent]):
    """A job's events, all its samples mixed, for one reader in the event loop that submitted it.

    The job ends within one engine step when the reader is cancelled while it waits here, when the stream is closed,
    and when nobody holds the stream any more.
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
        """All that waits to be read, one event for each sample that has any."""
        events = self._pending.queue.events
        taken = joined(events)
        events.clear()
        return taken

    @property
    def error(self) -> Exception | None:
        """The error that ended the job early; no event comes after it."""
        return self._pending.queue.error

    async def wait(self) -> RequestOutput:
        """Let the job run to its end, its events unread, and return the whole output. Cancelling this ends the job."""
        try:
            await asyncio.shield(self._pending.queue.over)
        except asyncio.CancelledError:
            self._worker.abort(self._pending)
            raise
        return self.output

    async def aclose(self) -> None:
        """End the job now; `output` is then what there is of it. Harmless when it is over."""
        queue = self._pending.queue
        if not queue.over.done():
            self._worker.abort(self._pending)
            await asyncio.shield(queue.over)
        queue.events.clear()

    @property
    def output(self) -> RequestOutput:
        """The whole result, or the part that there is of a job that was ended. Raises ParlayError while under way."""
        queue = self._pending.queue
        if not queue.over.done():
            raise ParlayError("the stream is under way: iterate to its end, or close it, before asking for its output")
        if queue.error is not None:
            raise queue.error
        return self._pending.job.output()

    @property
    def timed_out(self) -> bool:
        """Whether its time limit ended the job; its samples then finished for the reason ``abort``."""
        return self._pending.timed_out

    def __del__(self) -> None:
        if not self._pending.queue.over.done():
            self._worker.abort(self._pending)
