"""Counts each sequence's n-grams, updated as the sequence changes, within the time that a step allows."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from parlay.drafters.per_sequence import History
from parlay.drafters.state_room import StateBytes, StateRoom
from parlay.drafters.step_budget import StepBudget
from parlay.ngrams.in_context import NgramCounts
from parlay.types import SequenceView

GRAM_BYTES = 200
"""Bytes per token and n-gram size: 90 to 210 were measured on code and on random ids."""


class CountedText:
    """The counts of one sequence's tokens, updated as the sequence changes."""

    def __init__(self, longest: int, vocab_size: int) -> None:
        self.counts = NgramCounts(longest, vocab_size)
        self._history = History()
        self._log = array("i")

    def __len__(self) -> int:
        """How many tokens are counted."""
        return len(self._history.tokens)

    def follow(self, tokens: Sequence[int], step: StepBudget | None = None) -> None:
        """Count the sequence's new tokens, as far as this step allows, and uncount those that it no longer has."""
        history = self._history
        agreed = history.agree(tokens)
        if agreed < len(history.tokens):
            self.counts.remove(history.tokens, agreed, self._log)
            history.cut(agreed)
        new = len(tokens) - agreed
        most = new if step is None else step.take(new)
        if most:
            history.tokens += tokens[agreed : agreed + most]
            self.counts.add(history.tokens, agreed, self._log)


class CountedTexts:
    """The `CountedText` of each sequence, made on first use. Each step counts as many tokens as `StepBudget` allows."""

    def __init__(self, longest: int, vocab_size: int, room: StateRoom) -> None:
        self._longest = longest
        self._vocab_size = vocab_size
        self._texts: dict[int, CountedText] = {}
        self._bytes = StateBytes(room, self._texts)
        self._step = StepBudget(room, longest * GRAM_BYTES)

    def begin(self, budgets: Sequence[int]) -> None:
        """Begin a step in which the sequences with a budget draft."""
        self._step.begin(budgets)

    def of(self, view: SequenceView) -> NgramCounts:
        """The counts of a sequence, as far as it has been counted."""
        text = self._texts.get(view.sequence)
        if text is None:
            text = self._texts[view.sequence] = CountedText(self._longest, self._vocab_size)
        text.follow(view.tokens, self._step)
        self._bytes.set(view.sequence, len(text) * self._longest * GRAM_BYTES)
        return text.counts

    def release(self, sequence: int) -> None:
        self._texts.pop(sequence, None)
        self._bytes.release(sequence)
