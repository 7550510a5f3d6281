"""A target that writes given texts: it computes what its model computes, and the tokens that it prefers are given."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from parlay.models.wrapped_runner import WrappedRunner
from parlay.types import NO_SKIP, Output, Runner, Segment, Skip, trees

Ids = tuple[int, ...]
_FAR = 1e4  # a logit above any other


class Forward(NamedTuple):
    """How many rows ran, whether states were tapped for a head, and the seconds that it took."""

    rows: int
    tapped: bool
    seconds: float


class ForcedRunner(WrappedRunner):
    """Passes everything on to ``inner``, and puts the given token of each row's position far ahead of all others.

    So drafters see the states that the model has on this text, and forwards take what they take. Only rows on the path
    of the given text are ever accepted, so what rows on other paths prefer does not matter. Sequences are opened by
    their prompts: `expect` says which answer goes with the next one. ``last`` is the latest forward.
    """

    def __init__(self, inner: Runner) -> None:
        super().__init__(inner)
        self.last = Forward(0, False, 0.0)
        self._expected: tuple[Ids, Ids] = ((), ())
        self._texts: dict[int, Ids] = {}
        self._cached: dict[int, int] = {}

    def expect(self, prompt: Ids, answer: Ids) -> None:
        """Sets the answer to the next sequence, which begins with that prompt."""
        self._expected = prompt, answer

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        prompt, answer = self._expected
        if tuple(tokens[: len(prompt)]) != prompt:
            raise ValueError("no answer is given to this prompt")
        self._texts[sequence] = prompt + answer
        self._cached[sequence] = self._inner.open(sequence, tokens, salt)
        return self._cached[sequence]

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        began = time.perf_counter()
        out = self._inner.forward(segments, taps, skip)
        self.last = Forward(sum(each.rows for each in segments), bool(taps), time.perf_counter() - began)
        tokens = [token for segment in segments for token in self._given(segment)]
        out.logits_RV[range(len(tokens)), tokens] = _FAR
        return out

    def _given(self, segment: Segment) -> list[int]:
        """The given token after each row that wants logits; after its end, the last one."""
        text, first = self._texts[segment.sequence], self._cached[segment.sequence]
        root = first + len(segment.pending) - 1
        places = [*range(first, root + 1), *(root + depth for depth in trees.depths(segment.tree))]
        return [text[min(place + 1, len(text) - 1)] for place in places[segment.logits_from :]]

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        self._cached[sequence] = self._inner.keep(sequence, path)
        return self._cached[sequence]

    def truncate(self, sequence: int, length: int) -> int:
        self._cached[sequence] = self._inner.truncate(sequence, length)
        return self._cached[sequence]

    def fork(self, sequence: int, copy: int) -> None:
        self._inner.fork(sequence, copy)
        self._texts[copy], self._cached[copy] = self._texts[sequence], self._cached[sequence]

    def release(self, sequence: int) -> None:
        self._inner.release(sequence)
        self._texts.pop(sequence, None)
        self._cached.pop(sequence, None)
