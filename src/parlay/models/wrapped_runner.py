"""The base of runners that wrap another one to observe or change a part of its work."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.types import NO_SKIP, Output, Runner, RunnerSpec, Segment, Skip


class WrappedRunner(Runner):
    """Forwards all calls to ``inner``, one forward at a time; see `parlay.types.Runner`."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner

    @property
    def spec(self) -> RunnerSpec:
        return self._inner.spec

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        return self._inner.open(sequence, tokens, salt)

    def reserve(self, sequence: int, tokens: int) -> bool:
        return self._inner.reserve(sequence, tokens)

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        return self._inner.forward(segments, taps, skip)

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        return self._inner.keep(sequence, path)

    def truncate(self, sequence: int, length: int) -> int:
        return self._inner.truncate(sequence, length)

    def fork(self, sequence: int, copy: int) -> None:
        self._inner.fork(sequence, copy)

    def release(self, sequence: int) -> None:
        self._inner.release(sequence)

    def free_tokens(self) -> int:
        return self._inner.free_tokens()

    def capacity(self) -> int:
        return self._inner.capacity()

    def check(self) -> None:
        self._inner.check()
