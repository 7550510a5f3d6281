"""A runner that records the logits that it returns, so that a differing token can be traced to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from parlay.models.wrapped_runner import WrappedRunner
from parlay.testing.toys import row_texts
from parlay.types import NO_SKIP, Output, Runner, RunnerSpec, Segment, Skip

Texts = dict[tuple[int, ...], list[Tensor]]
"""Rows of logits by the text before them. A text that was computed several times has several rows."""


class RecordingRunner(WrappedRunner):
    """Passes all calls on to ``inner``, and records the logits in ``texts``."""

    def __init__(self, inner: Runner) -> None:
        super().__init__(inner)
        self.texts: Texts = {}
        self._cached: dict[int, list[int]] = {}
        self._fed: dict[int, Segment] = {}

    @property
    def spec(self) -> RunnerSpec:
        return replace(self._inner.spec, likeliest=False)

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        cached = self._inner.open(sequence, tokens, salt)
        self._cached[sequence] = list(tokens[:cached])
        return cached

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        out = self._inner.forward(segments, taps, skip)
        for index, segment in enumerate(segments):
            if skip:  # neither the model's logits nor rows to keep
                continue
            self._fed[segment.sequence] = segment
            texts = row_texts(self._cached[segment.sequence], segment)[segment.logits_from - segment.base :]
            rows = out.logits_RV[out.starts[index] : out.starts[index + 1]]
            for text, logits_V in zip(texts, rows, strict=True):
                self.texts.setdefault(tuple(text), []).append(logits_V.detach().clone())
        return out

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        length = self._inner.keep(sequence, path)
        fed = self._fed[sequence]
        cached = [*self._cached[sequence], *fed.pending, *(fed.tree.tokens[node] for node in path)]
        self._cached[sequence] = cached[:length]
        return length

    def truncate(self, sequence: int, length: int) -> int:
        length = self._inner.truncate(sequence, length)
        del self._cached[sequence][length:]
        return length

    def fork(self, sequence: int, copy: int) -> None:
        self._inner.fork(sequence, copy)
        self._cached[copy] = list(self._cached[sequence])

    def release(self, sequence: int) -> None:
        self._inner.release(sequence)
        self._cached.pop(sequence, None)
        self._fed.pop(sequence, None)
