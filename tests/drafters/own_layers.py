"""A fake of a target's own layers, with known logits for every text and every set of skipped layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parlay.testing.toys import RandomLogits
from parlay.types import WHOLE_FORM, DraftForm, Exactness, Request, RunnerSpec, SequenceView, Skip
from tests.drafters.sight import GREEDY

VOCAB = 12
TARGET = RunnerSpec("six", VOCAB, 1000, "tree", Exactness.BITS, 8, 6, "cpu", "float32", "none", layer_skip=True)
LOGITS = RandomLogits(VOCAB)

LogitsOf = Callable[[Sequence[int], Skip], Tensor]


@dataclass
class Layers:
    """``calls``: the sequences, the skipped layers, and the number of rows of each text."""

    logits_of: LogitsOf
    calls: list[tuple[tuple[int, ...], Skip, int]] = field(default_factory=list)

    def forward(
        self, views: Sequence[SequenceView], paths: Sequence[Sequence[int]], form: DraftForm = WHOLE_FORM, rows: int = 1
    ) -> Tensor:
        skip = form.skip
        self.calls.append((tuple(view.sequence for view in views), skip, rows))
        texts = [[*view.tokens, *path] for view, path in zip(views, paths, strict=True)]
        ends = [text[:end] for text in texts for end in range(len(text) - rows + 1, len(text) + 1)]
        return torch.stack([self.logits_of(text, skip) for text in ends])

    @property
    def tried(self) -> list[Skip]:
        """The layers skipped in calls that asked for more than the last row."""
        return [skip for _, skip, rows in self.calls if rows > 1]


@dataclass
class LayeredSight:
    """A `SequenceView` that has the target's layers."""

    sequence: int
    tokens: list[int]
    layers: Layers
    request: Request = GREEDY
    prompt_length: int = 1
