"""A target that costs nothing: precomputed logits, so that what is left of a step is the engine's own work."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from parlay import trees
from parlay.cost.measured import MeasuredCost
from parlay.types import Exactness, Output, RunnerSpec, Segment

PERIOD = 64
"""After so many tokens the greedy text comes back."""


class StubRunner:
    """Implements `Runner`: the logits of a row depend on its position alone. Holds numbers of tokens, no tokens.

    ``forward_seconds`` is the time spent inside `forward` since it was last set to zero.
    """

    def __init__(self, vocab_size: int, max_context: int = 1 << 20) -> None:
        self.spec = RunnerSpec(
            name="stub",
            vocab_size=vocab_size,
            max_context=max_context,
            tree="tree",
            exactness=Exactness.BITS,
            hidden_size=1,
            num_layers=1,
            device="cpu",
            dtype="float32",
            kernels="none: the logits are looked up",
        )
        self.forward_seconds = 0.0
        self.forwards = 0
        self._logits_PV = _bank(vocab_size)
        self._best_P: list[int] = self._logits_PV.argmax(dim=-1).tolist()
        self._cached: dict[int, int] = {}
        self._fed: dict[int, int] = {}

    def text(self, length: int) -> tuple[int, ...]:
        """The beginning of the greedy text."""
        return tuple(self._best_P[(place - 1) % PERIOD] for place in range(length))

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        self._cached[sequence] = 0
        return 0

    def reserve(self, sequence: int, tokens: int) -> bool:
        return True

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> Output:
        began = time.perf_counter()
        self.forwards += 1
        rows: list[int] = []
        starts = [0]
        for segment in segments:
            cached = self._cached[segment.sequence]
            self._fed[segment.sequence] = len(segment.pending)
            root = cached + len(segment.pending) - 1
            places = [*range(cached, root + 1), *(root + depth for depth in trees.depths(segment.tree))]
            rows += (place % PERIOD for place in places[segment.logits_from :])
            starts.append(len(rows))
        out = Output(self._logits_PV[rows], tuple(starts))
        self.forward_seconds += time.perf_counter() - began
        return out

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        self._cached[sequence] += self._fed[sequence] + len(path)
        return self._cached[sequence]

    def truncate(self, sequence: int, length: int) -> int:
        self._cached[sequence] = min(length, self._cached[sequence])
        return self._cached[sequence]

    def fork(self, sequence: int, copy: int) -> None:
        self._cached[copy] = self._cached[sequence]

    def release(self, sequence: int) -> None:
        self._cached.pop(sequence, None)

    def room(self) -> int:
        return self.capacity()

    def capacity(self) -> int:
        return 1 << 30

    def check(self) -> None:
        """Nothing can be wrong with numbers of tokens."""


class StubCost(MeasuredCost):
    """Keeps the books like the real one, but of forwards that take as long as a small model's.

    With the stub's own times no draft would ever pay, and no step would draft.
    """

    def record(self, rows: int, context: int, seconds: float) -> None:
        super().record(rows, context, 0.004 + 0.0001 * rows)


def _bank(vocab_size: int) -> torch.Tensor:
    """Logits ``[PERIOD, V]``: greedy text repeats with the period, one sampled token in twenty-five or so differs."""
    generator = torch.Generator().manual_seed(0)
    logits_PV = torch.randn(PERIOD, vocab_size, generator=generator)
    best_P = torch.randperm(vocab_size, generator=generator)[:PERIOD]
    logits_PV[torch.arange(PERIOD), best_P] += 3.7 + math.log(vocab_size)
    return logits_PV
