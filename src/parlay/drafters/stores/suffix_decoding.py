"""SuffixDecoding (Oliaro et al. 2024): what most often followed the latest tokens, in this request or in past ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parlay.drafters.per_sequence import OneByOne
from parlay.drafters.resources import Resources
from parlay.drafters.stores.output_store import KnownTexts, StoreOptions
from parlay.drafters.stores.suffix_tree import NOTHING, SuffixGrowth, speculate
from parlay.options import option
from parlay.types import Draft, Needs, Observation, SequenceView

SOURCE = "suffix-decoding"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixDecodingOptions(StoreOptions):
    """Options of SuffixDecoding: the size of a draft by the length of its match."""

    depth: int = option(64, "maximum tokens of match and draft together", low=2, high=256)
    factor: float = option(1.0, "nodes to draft for each matching token", low=0, high=64)
    offset: float = option(0.0, "nodes to draft in addition", low=-64, high=1024)
    min_prob: float = option(0.1, "minimum probability of a drafted path", low=0, high=1)
    shape: str = option("tree", "tree: several continuations; path: the likeliest", choices=("tree", "path"))


class SuffixDecoding(OneByOne):
    """SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975).

    Two suffix trees with counts: one of the request's references, prompt and output, one of the outputs of past
    requests (`OutputStores`). For each end of the text, of m = 1, 2, ... tokens, that occurred before, a tree of at
    most ``min(k, factor * m + offset)`` continuations grows best first by path probability, the product of the shares
    in which each token followed; nodes below ``min_prob`` are left out. The tree of the largest sum of path
    probabilities is the draft; ties go to the longer match, then to the request's own text. ``shape=path`` follows the
    likeliest token only. Match and continuation together have at most ``depth`` tokens.

    The authors' setting is the default. Shares leave out the end of the text, which nothing has followed yet.
    """

    needs = Needs()

    def __init__(self, resources: Resources, options: SuffixDecodingOptions) -> None:
        self._factor = options.factor
        self._offset = options.offset
        self._min_prob = options.min_prob
        self._branching = options.shape == "tree"
        self._texts = KnownTexts(options.depth, resources, options, SOURCE)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self._texts.begin(budgets)
        return super().propose(views, budgets)

    def _propose(self, view: SequenceView, budget: int) -> Draft:
        request = view.request
        text = self._texts.own(view)
        growth = SuffixGrowth(budget, self._factor, self._offset, self._min_prob, self._branching, request.stop_ids)
        best = NOTHING
        if text is not None:
            own = text.suffixes
            best = speculate(own, own.window, own.window_length, growth, best)
        past = self._texts.past(request)
        if past is not None:
            best = speculate(past, *past.match(view.tokens), growth, best)
        return best.draft(SOURCE)

    def observe(self, observations: Sequence[Observation]) -> None:
        self._texts.observe(observations)

    def release(self, sequence: int) -> None:
        self._texts.release(sequence)
