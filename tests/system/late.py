"""Makes a bounded process's answers come too late, on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from parlay.system import bounded_process


@contextmanager
def late_answers() -> Iterator[None]:
    """Make every wait for a bounded process time out, although the process may have answered already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_process.Connection, "poll", lambda _connection, _seconds: False)
        yield
