"""Predicted outputs: drafts copy from a text that the output mostly repeats, and find it again after each change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from parlay.drafters.combined import members
from parlay.drafters.copying.alignment import LOST, Trail, chance
from parlay.drafters.copying.predicted_text import TOKEN_BYTES, PredictedText, PredictionPlace
from parlay.drafters.other_vocabularies.letters import Letters
from parlay.drafters.other_vocabularies.vocabularies import Codec
from parlay.drafters.resources import Resources
from parlay.drafters.state_room import StateBytes
from parlay.drafters.step_budget import StepBudget
from parlay.options import Options, UsageError, option
from parlay.types import NO_DRAFT, Draft, Observation, SequenceView, trees

SOURCE = "prediction"

_MOST = 32_768
"""The most tokens of a prediction that are read: 10 ms of a step, and more than answers have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionOptions(Options):
    """Options of drafts from a prediction: the drafter for where the prediction does not help."""

    fallback: tuple[str, ...] = option(
        ("prompt-lookup",), "strategy that drafts where the output left the prediction; empty: none", strategies=True
    )


class PredictedOutput:
    """Drafts from a predicted output, which is the request's first reference.

    Copying starts at the prediction's beginning, before there is any output, and continues while the output agrees.
    Texts are compared letter by letter, so it does not matter how they are cut into tokens. When the output departs
    from the prediction, the drafter searches for its latest letters, first after the place of departure and then before
    it. Until it finds them, it assumes that the first different token replaces the predicted one, and that a line begun
    later comes before the next predicted line of equal indentation. Where a predicted token is only partly used, the
    rest of the text is cut into tokens again.

    Where the place is uncertain, ``fallback`` drafts too. Where the prediction is used up, it drafts alone.
    """

    def __init__(self, resources: Resources, options: PredictionOptions) -> None:
        if len(options.fallback) > 1:
            raise UsageError(f"strategy {SOURCE}: fallback={'+'.join(options.fallback)} must name one drafter, or none")
        self._fallback = [members.build(SOURCE, nested) for nested in resources.nested]
        self.needs = members.needs_of(self._fallback)
        self._vocab_size = resources.vocab_size
        self._letters = Letters(resources.tokenizer)
        tokenizer = resources.tokenizer
        self._codec = Codec(tokenizer) if tokenizer is not None and tokenizer.is_fast else None
        self._step = StepBudget(resources.room, TOKEN_BYTES)
        self._copies: dict[int, _PredictionCopy] = {}
        self._bytes = StateBytes(resources.room, self._copies)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self._step.begin(budgets)
        own = [self._propose(view, budget) for view, budget in zip(views, budgets, strict=True)]
        if not self._fallback:
            return [draft for draft, _ in own]
        wanted = [_share(budget, draft, sure) for budget, (draft, sure) in zip(budgets, own, strict=True)]
        others = self._fallback[0].propose(views, wanted)
        return [_joined(draft, other, budget) for (draft, _), other, budget in zip(own, others, budgets, strict=True)]

    def _propose(self, view: SequenceView, budget: int) -> tuple[Draft, bool]:
        """The copy, and whether its place is certain."""
        if budget <= 0 or not view.request.references:
            return NO_DRAFT, False
        copy = self._copy(view)
        if copy is None:
            return NO_DRAFT, False
        predicted, spot = copy.predicted, copy.trail.follow(view.tokens)
        self._bytes.set(view.sequence, copy.nbytes)
        if spot.place == LOST:
            return NO_DRAFT, False
        ids = predicted.continuation(spot.place, view.tokens, budget, self._codec)
        tokens = list(takewhile(lambda token: token < self._vocab_size, ids))  # a tokenizer may know more ids
        agreed = predicted.tokens_agreed(spot)
        scores = [chance(agreed + depth) for depth in range(len(tokens))]
        return trees.chain(tokens, SOURCE, scores), predicted.is_sure(spot)

    def _copy(self, view: SequenceView) -> _PredictionCopy | None:
        """The state of the copy; None while the step has no time to read the prediction."""
        copy, references = self._copies.get(view.sequence), view.request.references
        if copy is None or copy.references is not references:
            others = (each.predicted for each in self._copies.values() if each.references is references)
            predicted = next(others, None)
            if predicted is None and self._step.take_whole(min(len(references[0]), _MOST)):
                predicted = PredictedText(references[0][:_MOST], self._letters)
            if predicted is None:
                return None
            copy = self._copies[view.sequence] = _PredictionCopy(view, predicted)
        return copy

    def observe(self, observations: Sequence[Observation]) -> None:
        for fallback in self._fallback:
            fallback.observe(observations)

    def release(self, sequence: int) -> None:
        self._copies.pop(sequence, None)
        self._bytes.release(sequence)
        for fallback in self._fallback:
            fallback.release(sequence)


def _share(budget: int, draft: Draft, sure: bool) -> int:
    """How many nodes the fallback gets: all if nothing is copied, a few if the copy's place is uncertain."""
    if not len(draft):
        return max(0, budget)
    return 0 if sure else max(1, budget // 4)


def _joined(copy: Draft, other: Draft, budget: int) -> Draft:
    """Both drafts in one tree. If it has too many nodes, the end of the copy is cut."""
    if not len(other):
        return copy
    begin = trees.first(copy, max(0, budget - len(other)))
    return trees.first(trees.merge([begin, other, copy]), budget)


class _PredictionCopy:
    """The state of one sequence."""

    __slots__ = ("predicted", "references", "trail")

    def __init__(self, view: SequenceView, predicted: PredictedText) -> None:
        self.references = view.request.references
        self.predicted = predicted
        step = partial(predicted.after, begin=view.prompt_length)
        beginning, lost = predicted.beginning, PredictionPlace(LOST, 0, 0)
        self.trail: Trail[PredictionPlace] = Trail(beginning, lost, step, view.prompt_length)

    @property
    def nbytes(self) -> int:
        """Bytes including the prediction, although all samples of a request share it."""
        return len(self.predicted) * TOKEN_BYTES + self.trail.nbytes
