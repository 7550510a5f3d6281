"""One call at a time: an engine is for one thread, so calls from several threads wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from parlay.types import ParlayError


class CallLock:
    """Calls enter one after another. A thread whose own earlier call has not left would wait forever: an error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Until the block is left, calls of other threads wait. Raises ParlayError for one of the same thread."""
        me = threading.get_ident()
        if self._owner == me:
            raise ParlayError("a stream of this LLM is under way: end or close it first, or use parlay.aio.AsyncLLM")
        with self._lock:
            self._owner = me
            try:
                yield
            finally:
                self._owner = None
