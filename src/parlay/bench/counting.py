"""The base of runners that compute no keys and values and only count the cached tokens of each sequence."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.types import Exactness, Runner, RunnerSpec, Segment, trees


class CountingRunner(Runner):
    """A `Runner` without `forward` and without a memory limit. A subclass computes a row's logits from its position."""

    def __init__(self, name: str, vocab_size: int, *, kernels: str, max_context: int = 1 << 20) -> None:
        self._spec = RunnerSpec(
            name=name,
            vocab_size=vocab_size,
            max_context=max_context,
            tree="tree",
            exactness=Exactness.BITS,
            hidden_size=1,
            num_layers=1,
            device="cpu",
            dtype="float32",
            kernels=kernels,
        )
        self._cached: dict[int, int] = {}
        self._fed: dict[int, int] = {}

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def places(self, segment: Segment) -> list[int]:
        """Feed the segment's rows, and return the positions of the rows that want logits."""
        cached = self._cached[segment.sequence]
        self._fed[segment.sequence] = len(segment.pending)
        root = cached + len(segment.pending) - 1
        positions = [*range(cached, root + 1), *(root + depth for depth in trees.depths(segment.tree))]
        return positions[segment.logits_from :]

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        self._cached[sequence] = 0
        return 0

    def reserve(self, sequence: int, tokens: int) -> bool:
        return True

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

    def free_tokens(self) -> int:
        return self.capacity()

    def capacity(self) -> int:
        return 1 << 30

    def check(self) -> None:
        """Check nothing: counts can't be inconsistent."""
