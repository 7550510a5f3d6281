"""A runner whose logits depend on all earlier tokens, so that a stale cache shows in the next draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from parlay.types import NO_SKIP, Exactness, OutOfRoom, Output, RunnerSpec, Segment, Skip

VOCAB = 12


class ToyRunner:
    """A runner that caches token lists. ``capacity``: how many tokens all sequences may hold together."""

    def __init__(self, capacity: int = 10_000, vocab: int = VOCAB, trees: bool = True, max_context: int = 1000) -> None:
        tree = "tree" if trees else "chain"
        self.spec = RunnerSpec("toy", vocab, max_context, tree, Exactness.BITS, 1, 1, "cpu", "float32", "none")
        self.cached: dict[int, list[int]] = {}
        self.reserved: dict[int, int] = {}
        self.capacity = capacity
        self.calls: list[list[Segment]] = []
        self._last: dict[int, Segment] = {}

    def logits(self, prefix: Sequence[int]) -> Tensor:
        noise = torch.Generator().manual_seed(hash(tuple(prefix)) % (1 << 60))
        return torch.randn(self.spec.vocab_size, generator=noise) * 2

    def continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return the tokens that the model writes next under greedy decoding."""
        written: list[int] = []
        for _ in range(count):
            written.append(int(self.logits([*tokens, *written]).argmax()))
        return written

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        assert sequence not in self.cached
        self.cached[sequence] = []
        self.reserved[sequence] = 0
        return 0

    def reserve(self, sequence: int, tokens: int) -> bool:
        if tokens > self.capacity:
            raise OutOfRoom("the toy is too small")
        others = sum(size for name, size in self.reserved.items() if name != sequence)
        if others + tokens > self.capacity:
            return False
        self.reserved[sequence] = tokens
        return True

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        self.calls.append(list(segments))
        assert len({segment.sequence for segment in segments}) == len(segments)
        rows: list[Tensor] = []
        starts = [0]
        for segment in segments:
            last = self._last.get(segment.sequence)
            assert segment.base == 0 or (last is not None and segment.follows(last))
            assert segment.base <= segment.logits_from
            wanted = self._prefixes(segment)[segment.logits_from :]
            assert len(self.cached[segment.sequence]) + segment.end <= self.reserved[segment.sequence]
            rows += [self.logits(prefix) for prefix in wanted]
            starts.append(len(rows))
            self._last[segment.sequence] = segment
        empty = torch.zeros(0, self.spec.vocab_size)
        return Output(torch.stack(rows) if rows else empty, tuple(starts))

    def _prefixes(self, segment: Segment) -> list[list[int]]:
        assert segment.pending
        cached = self.cached[segment.sequence]
        prefixes = [[*cached, *segment.pending[: end + 1]] for end in range(len(segment.pending))]
        nodes: list[list[int]] = []
        for token, parent in zip(segment.tree.tokens, segment.tree.parents, strict=True):
            nodes.append([*(nodes[parent] if parent >= 0 else prefixes[-1]), token])
        return prefixes + nodes

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        segment = self._last.pop(sequence)
        assert all(segment.tree.parents[node] == before for before, node in zip([-1, *path], path, strict=False))
        self.cached[sequence] += [*segment.pending, *(segment.tree.tokens[node] for node in path)]
        return len(self.cached[sequence])

    def truncate(self, sequence: int, length: int) -> int:
        del self.cached[sequence][length:]
        self.reserved[sequence] = len(self.cached[sequence])  # room beyond the cached tokens is given back
        return len(self.cached[sequence])

    def fork(self, sequence: int, copy: int) -> None:
        self.cached[copy] = list(self.cached[sequence])

    def release(self, sequence: int) -> None:
        self.cached.pop(sequence, None)
        self.reserved.pop(sequence, None)

    def free_tokens(self) -> int:
        return self.capacity - sum(self.reserved.values())

    def check(self) -> None:
        return None


@pytest.fixture
def toy_runner() -> Callable[..., ToyRunner]:
    return ToyRunner
