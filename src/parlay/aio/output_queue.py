"""Carries messages from the engine thread to one event loop, with few wake-ups."""

from __future__ import annotations

import asyncio
import math
from collections import deque

from parlay.aio.job_queue import Message, PendingJob

BETWEEN_SECONDS = 0.01
"""Between two deliveries of what quick steps add. A wake-up and what follows it, up to the write to a client, costs a
quarter of a millisecond of a core that the decoder could use; a reader does not see 10 ms."""


class OutputQueue:
    """Messages for the jobs of one event loop, in order.

    Where steps are slower than `BETWEEN_SECONDS`, the engine thread wakes the loop for each of them. Where they are
    quicker, the loop looks by itself every `BETWEEN_SECONDS`, until there is nothing, and the engine thread only
    puts messages. Urgent messages always wake it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._messages: deque[tuple[PendingJob, Message]] = deque()
        self._urgent = False  # the engine thread's own
        self._coming = False  # the loop has been called, or its timer is set: it will look at the messages
        self._timer: asyncio.TimerHandle | None = None
        self._last = -math.inf

    def put(self, job: PendingJob, message: Message, *, urgent: bool) -> None:
        """Queue a message. The engine thread calls `wake` when it has put all of a step."""
        self._messages.append((job, message))
        self._urgent = self._urgent or urgent

    def wake(self) -> None:
        """Wake the loop where that is needed. Raises RuntimeError when it is closed and messages wait."""
        if self._messages and (self._urgent or not self._coming or self._loop.is_closed()):
            self._urgent, self._coming = False, True
            self._loop.call_soon_threadsafe(self._deliver, False)

    @property
    def waiting(self) -> set[PendingJob]:
        """The jobs that have messages in the queue."""
        return {job for job, _ in self._messages}

    def _deliver(self, timed: bool) -> None:
        """Deliver in the loop. What is put while this runs finds ``_coming`` unset, or is delivered here."""
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
