"""Carries messages from the engine thread to one event loop, with few wake-ups."""

from __future__ import annotations

import asyncio
import math
from collections import deque

from parlay.aio.job_queue import Message, PendingJob

Letter = tuple[PendingJob, Message]

BETWEEN_SECONDS = 0.01
"""Between two hand-outs of what quick steps add. A wake-up and what follows it, up to the write to a client, costs a
quarter of a millisecond of a core that the decoder could use; a reader does not see 10 ms."""


class OutputQueue:
    """Letters for the mailboxes of one event loop, in order.

    Where steps are slower than `BETWEEN_SECONDS`, the engine thread wakes the loop for each of them. Where they are
    quicker, the loop looks by itself every `BETWEEN_SECONDS`, until there is nothing, and the engine thread only leaves
    letters. Urgent letters always wake it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[Letter] = deque()
        self._urgent = False  # the engine thread's own
        self._coming = False  # the loop has been called, or its timer is set: it will look at the letters
        self._timer: asyncio.TimerHandle | None = None
        self._last = -math.inf

    def leave(self, letter: Letter, *, urgent: bool) -> None:
        """For the engine thread, which calls `wake` when it has left all letters of a step."""
        self._letters.append(letter)
        self._urgent = self._urgent or urgent

    def wake(self) -> None:
        """Wake the loop where that is needed. Raises RuntimeError when it is closed and letters wait."""
        if self._letters and (self._urgent or not self._coming or self._loop.is_closed()):
            self._urgent, self._coming = False, True
            self._loop.call_soon_threadsafe(self._hand_out, False)

    @property
    def waiting(self) -> set[PendingJob]:
        """The jobs that have messages which nobody has picked up."""
        return {pending for pending, _ in self._letters}

    def _hand_out(self, timed: bool) -> None:
        """In the loop. What is left while this runs finds ``_coming`` unset, or is handed out here."""
        self._coming = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now, found = self._loop.time(), False
        while self._letters:
            pending, message = self._letters.popleft()
            pending.queue.put(message)
            found = True
        if found and (timed or now - self._last < BETWEEN_SECONDS):
            self._coming = True
            self._timer = self._loop.call_later(BETWEEN_SECONDS, self._hand_out, True)
        self._last = now
