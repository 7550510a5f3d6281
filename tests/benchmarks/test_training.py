"""The page on training says how much more is taken than can't be saved."""

from __future__ import annotations

import torch

from benchmarks.drafters.training import page
from parlay.train.data.features import Featured


def test_what_is_taken_stands_beside_what_cannot_be_saved() -> None:
    texts = [Featured(torch.arange(10), 4, torch.zeros(10, 2))]
    told = page("machine", texts, {"plain": 1.0, "head": 1.0, "features": 1.2, "loop": 1.4})
    assert "1 conversations of 10 tokens, of which the target wrote 6" in told
    assert "**1.30** (goal: 1.3)" in told
    assert "| states, computed and written | taken | 1.2 | 120.00 |" in told
