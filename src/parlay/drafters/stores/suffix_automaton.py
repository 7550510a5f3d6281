"""SAM decoding (Hu et al. 2024): copies from the longest match, in this request or in past ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parlay.drafters.combined import members
from parlay.drafters.resources import Resources
from parlay.drafters.stores.live_texts import LiveText
from parlay.drafters.stores.output_store import KnownTexts, StoreOptions
from parlay.drafters.stores.suffix_tree import NOTHING, SuffixGrowth, grow
from parlay.drafters.stores.suffixes import END, Suffixes, chance
from parlay.options import UsageError, option, refuse_unread
from parlay.types import NO_DRAFT, Draft, Observation, SequenceView, trees

SOURCE = "suffix-automaton"

_DEPTH = 64  # the most tokens of match and draft together in past outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixAutomatonOptions(StoreOptions):
    """Options of the suffix automaton: which matches count, and the drafter for where none does."""

    min_match: int = option(5, "if the match is shorter, `fallback` drafts", low=1, high=64)
    bias: int = option(
        5, "how many tokens longer a match in past outputs must be than one in this request", low=0, high=64
    )
    fallback: tuple[str, ...] = option((), "strategy that drafts if the match is short; empty: none", strategies=True)


class SuffixAutomaton:
    """SAM decoding (Hu et al. 2024, arXiv:2411.10666).

    There are two suffix automata: a dynamic one of the request's references, prompt and output, and a static one, here
    of the outputs of past requests (`OutputStores`). Each finds the longest end of the text that it holds. The draft
    comes from the longer match, from the static one only if it is more than ``bias`` tokens longer. A dynamic match is
    copied from its first occurrence, a static one along the tokens that followed most often. If the match has fewer
    than ``min_match`` tokens, the drafter ``fallback`` drafts, as token recycling or EAGLE-2 do in the authors' code;
    without a fallback short matches are copied too. Matches longer than 64 tokens count as 64.

    Defaults are the authors': ``min_match=5,bias=5``.
    """

    def __init__(self, resources: Resources, options: SuffixAutomatonOptions) -> None:
        self._min_match = options.min_match
        self._bias = options.bias
        if len(options.fallback) > 1:
            raise UsageError(f"strategy {SOURCE}: fallback={'+'.join(options.fallback)} must name one drafter or none")
        if not options.fallback:
            where = "without fallback=, which drafts where matches are shorter: name a strategy there"
            refuse_unread(f"strategy {SOURCE}", options, ("min_match",), where)
        self._fallback = [members.build(SOURCE, nested) for nested in resources.nested]
        self.needs = members.needs_of(self._fallback, outcomes=True)
        self._texts = KnownTexts(_DEPTH, resources, options, SOURCE)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self._texts.begin(budgets)
        drafts = [NO_DRAFT] * len(views)
        left: list[int] = []
        for place, (view, budget) in enumerate(zip(views, budgets, strict=True)):
            if budget > 0:
                length, drafts[place] = self._copy(view, budget)
                if length < self._min_match:
                    left.append(place)
        if self._fallback and left:
            given = self._fallback[0].propose([views[place] for place in left], [budgets[place] for place in left])
            for place, draft in zip(left, given, strict=True):
                drafts[place] = draft if len(draft) else drafts[place]
        return drafts

    def _copy(self, view: SequenceView, budget: int) -> tuple[int, Draft]:
        """Draft what follows the longest match in the text or past outputs. Also returns its length, less the bias."""
        text = self._texts.own(view)
        place, length = text.suffixes.first_copy() if text is not None else (-1, 0)
        past = self._texts.past(view.request)
        state, past_length = past.match(view.tokens) if past is not None else (0, 0)
        if past is not None and past_length - self._bias > length:
            return past_length - self._bias, _likeliest(past, state, past_length, budget, view)
        return length, _verbatim(text, place, length, budget, view) if text is not None else NO_DRAFT

    def observe(self, observations: Sequence[Observation]) -> None:
        self._texts.observe(observations)
        for fallback in self._fallback:
            fallback.observe(observations)

    def release(self, sequence: int) -> None:
        self._texts.release(sequence)
        for fallback in self._fallback:
            fallback.release(sequence)


def _verbatim(text: LiveText, place: int, length: int, budget: int, view: SequenceView) -> Draft:
    """A draft of the text from ``place`` on, up to its end or the first stop token."""
    if length == 0:
        return NO_DRAFT
    tokens: list[int] = []
    for token in text.text[place : place + budget]:
        if token == END:
            break
        tokens.append(token)
        if token in view.request.stop_ids:
            break
    return trees.chain(tokens, SOURCE, [chance(1.0, length + depth) for depth in range(len(tokens))])


def _likeliest(past: Suffixes, state: int, length: int, budget: int, view: SequenceView) -> Draft:
    """A draft along the most frequent tokens, from the longest suffix of the match that has a follower."""
    growth = SuffixGrowth(budget, 0.0, float(budget), 0.0, False, view.request.stop_ids)
    for end, shortest, longest in past.ends(state, length):
        found = grow(past, end, growth.match_length(shortest, longest, past.depth), growth, NOTHING.score)
        if found is not None:
            return found.draft(SOURCE)
    return NO_DRAFT
