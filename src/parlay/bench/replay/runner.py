"""A target that emits recorded answers.

With the accept rule of exact strategies, tokens per step are exact for these texts if the drafter reads only the text.
Times mean nothing here, except the time of drafting.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parlay.bench.counting import CountingRunner
from parlay.bench.replay.tokens import Ids
from parlay.types import NO_SKIP, Output, Segment, Skip

_CERTAIN = 20.0


class ReplayRunner(CountingRunner):
    """A `Runner` whose rows predict the recorded token at their position, whatever tokens come before them.

    This is right for every row whose draft path consists of recorded tokens, and only such rows decide what is
    accepted. Rows on wrong paths predict wrongly, but no strategy that can be replayed reads them. `expect` sets the
    answer to the prompt of the next sequence.
    """

    def __init__(self, vocab_size: int, name: str = "replay") -> None:
        super().__init__(name, vocab_size, kernels="none: the answers were recorded")
        self._answers: dict[Ids, Ids] = {}
        self._open: dict[int, Ids] = {}
        self._logits_RV = torch.zeros(0, vocab_size)
        self._marked = (torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))

    def expect(self, prompt: Ids, answer: Ids) -> None:
        """Set the answer to the next sequence, which has this prompt. Raises ValueError if either is empty."""
        if not prompt or not answer:
            raise ValueError("a recorded prompt and its answer need at least one token each")
        self._answers = {prompt: answer}

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        prompt = tuple(tokens)
        self._open[sequence] = prompt + self._answers[prompt]
        return super().open(sequence, tokens, salt)

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        tokens: list[int] = []
        starts = [0]
        for segment in segments:
            text = self._open[segment.sequence]
            tokens += [text[min(place + 1, len(text) - 1)] for place in self.places(segment)]
            starts.append(len(tokens))
        return Output(self._certain(tokens), tuple(starts))

    def _certain(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return, for each token, a row of logits in which it is nearly certain. The next forward reuses the memory."""
        self._logits_RV[self._marked] = 0.0
        if len(tokens) > len(self._logits_RV):
            self._logits_RV = torch.zeros(len(tokens), self.spec.vocab_size)
        self._marked = (torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.int64))
        self._logits_RV[self._marked] = _CERTAIN
        return self._logits_RV[: len(tokens)]

    def fork(self, sequence: int, copy: int) -> None:
        self._open[copy] = self._open[sequence]
        super().fork(sequence, copy)

    def release(self, sequence: int) -> None:
        self._open.pop(sequence, None)
        super().release(sequence)
