"""Tests kernels in Triton's interpreter on the CPU; `make check-gpu` runs them on a GPU."""

from __future__ import annotations

import pytest

from parlay.compiled.triton_here import INTERPRET


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make decoders in this test use Triton's attention kernels."""
    monkeypatch.setenv(INTERPRET, "1")
