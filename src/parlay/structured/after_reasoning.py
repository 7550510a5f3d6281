"""A constraint on the answer alone, which applies after the model's reasoning has ended."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parlay.structured.constraint import GrammarConstraint
from parlay.text.reasoning import Marks


class AfterReasoning:
    """A `Constraint` that allows any reasoning, except tokens that end the text, and applies ``answer`` after it.

    If the prompt does not begin the reasoning, the first token decides whether there is any: it is either the mark of
    reasoning, or the beginning of the answer.
    """

    def __init__(self, answer: GrammarConstraint, marks: Marks) -> None:
        self._answer = answer
        self._marks = marks
        self._committed = 0
        self._length: int | None = None if marks.begin is None else 0
        """How many of the committed tokens are reasoning; None while the reasoning goes on."""

    @property
    def failure(self) -> str | None:
        """See `GrammarConstraint`."""
        return self._answer.failure

    @property
    def committed(self) -> int:
        return self._committed

    def allowed(self, start: int, path: Sequence[int]) -> Tensor | None:
        """See `Constraint`."""
        length = self._reasoning(start, path)
        if length is None:
            return self._free() if self._answer.ending.isdisjoint(path) else None
        inside = max(0, start - length)
        mask_V = self._answer.allowed(inside, path[max(0, length - start) :])
        if mask_V is not None and self._may_begin(start + len(path)):
            mask_V[self._marks.begin] = True
        return mask_V

    def legal(self, tokens: Sequence[int]) -> int:
        """See `Constraint`."""
        length = self._reasoning(self.committed, tokens)
        if length is None:
            return next((place for place, token in enumerate(tokens) if token in self._answer.ending), len(tokens))
        free = max(0, length - self.committed)
        return free + self._answer.legal(tokens[free:])

    def forced(self, limit: int) -> tuple[int, ...]:
        """See `Constraint`."""
        if self._length is None or self._may_begin(self.committed):
            return ()
        return self._answer.forced(limit)

    def commit(self, token: int) -> bool:
        """See `Constraint`."""
        length = self._reasoning(self.committed, (token,))
        over = length is not None and length <= self.committed and self._answer.commit(token)
        self._committed += 1
        self._length = length
        return over

    def _may_begin(self, place: int) -> bool:
        return place == 0 and self._marks.begin is not None

    def _reasoning(self, start: int, path: Sequence[int]) -> int | None:
        """Count the reasoning tokens, marks included, among ``start`` committed tokens and ``path``. None if the
        reasoning has not ended in them."""
        if start and self._length is not None and self._length <= start:
            return self._length
        if self._may_begin(start) and (not path or path[0] != self._marks.begin):
            return 0
        return next((start + n + 1 for n, token in enumerate(path) if token == self._marks.end), None)

    def _free(self) -> Tensor:
        mask_V = torch.ones(self._answer.vocab_size, dtype=torch.bool)
        mask_V[sorted(self._answer.ending)] = False
        return mask_V
