"""Laws: the uniform distribution over a problem's right answers, and how often selectors succeed with it.

Suppose that a target knows this distribution: its rows give the probabilities of the words in each place, given the
decided words. If one place is decided per step, its answer is always right. If several are decided in one step, each is
drawn without knowing the others, so the answer may be wrong. This is the only loss of parallel decoding here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parlay.bench.quality.tasks import Words
from parlay.types import Canvas, CanvasSpec, Decided, Guesses, NoiseKey, Request, SamplingParams, Selector
from parlay.types.requests import FixedText

Places = tuple[int | None, ...]
"""The index of the word in each place; None for a place that is not decided."""


class Law:
    """The uniform distribution over right answers of one length.

    Words are replaced by numbers, so problems whose answers differ only in their words have the same law.
    """

    def __init__(self, answers: Sequence[Words]) -> None:
        """Make the law of these answers. Raises ValueError if their lengths differ."""
        numbers: dict[str, int] = {}
        rows = [[numbers.setdefault(word, len(numbers)) for word in answer] for answer in answers]
        if len({len(row) for row in rows}) != 1:
            raise ValueError("all right answers of a problem must have the same length for an oracle")
        self.words = tuple(numbers)
        self.answers_AP = torch.tensor(rows)
        self._known: dict[Places, Tensor] = {}

    @property
    def places(self) -> int:
        return self.answers_AP.shape[1]

    def consistent(self, decided: Places) -> Tensor:
        """Return the right answers ``[A, P]`` that contain the decided words in their places."""
        fits_A = torch.ones(len(self.answers_AP), dtype=torch.bool)
        for place, word in enumerate(decided):
            if word is not None:
                fits_A &= self.answers_AP[:, place] == word
        return self.answers_AP[fits_A]

    def logits(self, decided: Places) -> Tensor:
        """Return the logits ``[P, words]`` of each place, given the decided words.

        If no right answer contains all of them, the logits ignore them.
        """
        if decided not in self._known:
            answers_AP = self.consistent(decided)
            answers_AP = answers_AP if len(answers_AP) else self.answers_AP
            counts_PV = torch.zeros(self.places, len(self.words))
            counts_PV.scatter_add_(1, answers_AP.T, torch.ones(answers_AP.T.shape))
            self._known[decided] = counts_PV.log()
        return self._known[decided]


def success(law: Law, selector: Selector, prompt_length: int, seed: int = 0) -> float:
    """Return the probability that a selector fills a canvas with a right answer, summed over all right answers.

    The places that a selector decides next depend on the seed and on the decided words. So exactly one sequence of
    steps leads to each answer, and its probability is the product of the probabilities with which its words are drawn.
    Raises ValueError for a selector that opens places again, because what it keeps depends on other words that it drew.
    """
    if selector.revokes:
        raise ValueError("success can't be computed for a selector that opens places again: simulate it")
    params = SamplingParams(temperature=1, max_tokens=law.places)
    request = Request(id="", prompt=(0,) * prompt_length, params=params, key=NoiseKey(seed))
    view = FixedText(0, request, request.prompt, prompt_length)
    blank = Canvas(CanvasSpec(len(law.words)), (None,) * law.places, law.places)
    return _walk(law, selector, view, blank)


def _walk(law: Law, selector: Selector, view: FixedText, canvas: Canvas) -> float:
    """Return the probability that the canvas ends as a right answer, given the words that are decided on it."""
    if not canvas.open:
        return 1.0
    decided = tuple(None if each is None else each.token for each in canvas.places)
    probs_PV = law.logits(decided).double().softmax(-1)[list(canvas.open)]
    guesses = Guesses(canvas.open, tuple(probs_PV.argmax(-1).tolist()), probs_PV)
    (fill,) = selector.fill([view], [canvas], [guesses])
    chosen = list(fill.places)
    total = 0.0
    for drawn in torch.unique(law.consistent(decided)[:, chosen], dim=0).tolist():
        chance, places = 1.0, list(canvas.places)
        for place, word in zip(chosen, drawn, strict=True):
            chance *= probs_PV[canvas.open.index(place), word].item()
            places[place] = Decided(word, 0.0)
        rest = Canvas(canvas.spec, tuple(places), canvas.size, canvas.forwards + 1, memory=fill.memory)
        total += chance * _walk(law, selector, view, rest)
    return total
