"""From the engine thread to an event loop: in order, complete, soon, and with few wake-ups where steps are quick."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from parlay.aio.stream import BETWEEN_SECONDS, Message, OutputQueue, PendingJob


class Addressed:
    """A pending job of which only the queue is looked at."""

    def __init__(self, queue: Reader) -> None:
        self.queue = queue


class Reader:
    """A queue that notes what came, when, and in how many calls of the loop."""

    def __init__(self) -> None:
        self.read: list[tuple[float, int]] = []
        self.calls = 0
        self._called = False
        self.pending = cast(PendingJob, Addressed(self))

    def put(self, message: Any) -> None:
        self.read.append((time.monotonic(), message))
        if not self._called:
            self._called = True
            self.calls += 1
            asyncio.get_running_loop().call_soon(self._end_call)

    def _end_call(self) -> None:
        self._called = False

    def message(self, number: int) -> tuple[PendingJob, Message]:
        return self.pending, cast(Message, number)

    @property
    def numbers(self) -> list[int]:
        return [number for _, number in self.read]


def run(send: Callable[[OutputQueue, Reader], None], ready: Callable[[Reader], bool]) -> Reader:
    """Collect what a reader's loop receives while another thread sends."""

    async def wait() -> Reader:
        reader = Reader()
        outputs = OutputQueue(asyncio.get_running_loop())
        thread = threading.Thread(target=send, args=(outputs, reader))
        thread.start()
        for _ in range(12_000):
            if ready(reader):
                break
            await asyncio.sleep(0.005)
        thread.join()
        return reader

    return asyncio.run(wait())


def test_quick_steps_share_wake_ups_and_nothing_is_lost() -> None:
    def send(outputs: OutputQueue, reader: Reader) -> None:
        for number in range(200):
            outputs.put(*reader.message(number), urgent=False)
            outputs.wake()
            time.sleep(0.001)

    reader = run(send, lambda reader: len(reader.read) == 200)
    assert reader.numbers == list(range(200))
    seconds = reader.read[-1][0] - reader.read[0][0]
    assert reader.calls <= 3 + seconds / BETWEEN_SECONDS


def test_no_message_stays_behind_whenever_it_is_sent() -> None:
    """Steps of about the time at which the loop looks by itself: that it is about to stop must be seen."""

    def send(outputs: OutputQueue, reader: Reader) -> None:
        for number in range(60):
            outputs.put(*reader.message(number), urgent=False)
            outputs.wake()
            time.sleep(BETWEEN_SECONDS * (0.7 + number / 100))

    assert run(send, lambda reader: len(reader.read) == 60).numbers == list(range(60))


def test_urgent_messages_do_not_wait_for_the_loop_to_look_by_itself() -> None:
    async def send() -> None:
        outputs, reader = OutputQueue(asyncio.get_running_loop()), Reader()
        for number in range(40):
            outputs.put(*reader.message(number), urgent=True)
            outputs.wake()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert reader.numbers == list(range(number + 1))

    asyncio.run(send())


def test_a_closed_loop_is_an_error_for_the_sender() -> None:
    async def make() -> OutputQueue:
        return OutputQueue(asyncio.get_running_loop())

    outputs, reader = asyncio.run(make()), Reader()
    outputs.put(*reader.message(0), urgent=False)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            outputs.wake()
    assert outputs.waiting == {reader.pending}
