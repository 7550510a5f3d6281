"""A target with precomputed logits, so that nearly all of a step's time is the engine's own work."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from parlay.bench.counting import CountingRunner
from parlay.cost.measured import MeasuredCost
from parlay.types import NO_SKIP, Output, Segment, Skip

PERIOD = 64
"""The number of tokens after which the greedy text repeats itself."""


class StubRunner(CountingRunner):
    """Implements `Runner`: the logits of a row depend on its position alone.

    ``forward_seconds`` is the time spent inside `forward` since it was last set to zero.
    """

    def __init__(self, vocab_size: int, max_context: int = 1 << 20) -> None:
        super().__init__("stub", vocab_size, kernels="none: the logits are looked up", max_context=max_context)
        self.forward_seconds = 0.0
        self.forwards = 0
        self._logits_PV = _bank(vocab_size)
        self._best_P: list[int] = self._logits_PV.argmax(dim=-1).tolist()

    def text(self, length: int) -> tuple[int, ...]:
        """Return the first ``length`` tokens of the greedy text."""
        return tuple(self._best_P[(place - 1) % PERIOD] for place in range(length))

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        began = time.perf_counter()
        self.forwards += 1
        rows: list[int] = []
        starts = [0]
        for segment in segments:
            rows += (place % PERIOD for place in self.places(segment))
            starts.append(len(rows))
        out = Output(self._logits_PV[rows], tuple(starts))
        self.forward_seconds += time.perf_counter() - began
        return out


class StubCost(MeasuredCost):
    """A cost model like `MeasuredCost`, but with the forward times of a small model.

    With the stub's own times no draft would pay, so no step would draft.
    """

    def record(self, rows: int, context: int, seconds: float) -> None:
        super().record(rows, context, 0.004 + 0.0001 * rows)


def _bank(vocab_size: int) -> torch.Tensor:
    """Return logits ``[PERIOD, V]``. Greedy text repeats with the period; about one sampled token in 25 differs from
    it."""
    generator = torch.Generator().manual_seed(0)
    logits_PV = torch.randn(PERIOD, vocab_size, generator=generator)
    best_P = torch.randperm(vocab_size, generator=generator)[:PERIOD]
    logits_PV[torch.arange(PERIOD), best_P] += 3.7 + math.log(vocab_size)
    return logits_PV
