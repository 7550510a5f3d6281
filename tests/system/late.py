"""Answers that come too late, whatever the machine does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from parlay.system import bounded_process


@contextmanager
def late_answers() -> Iterator[None]:
    """Nobody hears from a bounded process in time, though it may have answered before anyone looks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_process.Connection, "poll", lambda _connection, _seconds: False)
        yield
