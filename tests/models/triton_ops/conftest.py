"""Kernels as Triton's interpreter runs them on CPU; `make check-gpu` runs them on a GPU."""

from __future__ import annotations

import pytest

from parlay.compiled.triton_here import INTERPRET


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders that are made in this test attend by Triton's kernels."""
    monkeypatch.setenv(INTERPRET, "1")
