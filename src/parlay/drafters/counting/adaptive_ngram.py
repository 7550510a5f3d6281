"""Adaptive n-gram parallel decoding (Ou et al. 2024): an n-gram model of the text so far drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parlay.drafters.counting.counted_texts import CountedTexts
from parlay.drafters.per_sequence import OneByOne
from parlay.drafters.resources import Resources
from parlay.options import Options, option
from parlay.types import Draft, SequenceView, trees

SOURCE = "adaptive-ngram"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveNgramOptions(Options):
    """Options of the adaptive n-gram drafter: lengths of the counted n-grams."""

    ngram: int = option(5, "longest n-gram, including the drafted token", low=2, high=16)


class AdaptiveNgram(OneByOne):
    """Adaptive n-gram parallel decoding, ANPD (Ou, Chen and Tian 2024, arXiv:2404.08698).

    An n-gram model counts the prompt and then each committed token. A draft is written token by token: the longest end
    of the text (``ngram`` - 1 tokens down to 1) that was seen before gives the token that followed it most often, and
    that token is part of the next query. Nothing is drafted after an unknown token. Of equally frequent followers the
    latest is taken.

    The paper's multi-level module has levels from ``ngram`` = 5 down to 2 (its published settings could not be
    checked against code: the authors' repository holds none).
    """

    def __init__(self, resources: Resources, options: AdaptiveNgramOptions) -> None:
        self._longest = options.ngram - 1
        self._texts = CountedTexts(self._longest, resources.vocab_size, resources.room)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self._texts.begin(budgets)
        return super().propose(views, budgets)

    def _propose(self, view: SequenceView, budget: int) -> Draft:
        counts = self._texts.of(view)
        window, size = counts.window(view.tokens[-self._longest :]), min(self._longest, len(view.tokens))
        tokens: list[int] = []
        scores: list[float] = []
        while size > 0 and len(tokens) < budget:
            found = counts.favourite(window, size)
            if found is None:
                size -= 1
                continue
            tokens.append(found.token)
            scores.append(found.chance(size))
            window = counts.shift(window, found.token)
            size = min(size + 1, self._longest)
        return trees.chain(tokens, SOURCE, scores)

    def release(self, sequence: int) -> None:
        self._texts.release(sequence)
