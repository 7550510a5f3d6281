"""A draft model with any tokenizer, by way of text (Timor et al. 2025): decode, encode, draft, decode, encode."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from parlay.drafters.draft_models.chains import Chain, ChainWriter, DraftView
from parlay.drafters.draft_models.opening import draft_name, open_writer
from parlay.drafters.options import UNIVERSAL_DRAFT as SOURCE
from parlay.drafters.options import UniversalDraftOptions
from parlay.drafters.other_vocabularies.vocabularies import (
    INCOMPLETE,
    TOKEN_BYTES,
    RetokenizedText,
    codecs,
    continuation,
    open_tokenizers,
    scores,
)
from parlay.drafters.per_sequence import FromText
from parlay.drafters.resources import Resources
from parlay.drafters.state_room import StateBytes
from parlay.types import NO_DRAFT, Draft, SequenceView, trees


class UniversalDraft(FromText):
    """Speculative decoding over text (SLEM of Timor et al. 2025, arXiv:2502.05202).

    transformers calls it universal assisted generation. The committed tokens are decoded, and encoded for a draft model
    with another tokenizer. The text that it writes, greedily, is encoded with the target's tokenizer and proposed.
    Tokenisations are compared in windows of ``window`` tokens (10 in transformers), so the draft model keeps the cache
    of all ids that did not change. If the text ends inside a character, nothing is drafted. Paths whose probability
    falls below ``min_p`` are not followed. A proposed token's score is the probability of the draft model's tokens that
    begin in it.
    """

    def __init__(self, resources: Resources, options: UniversalDraftOptions) -> None:
        name = draft_name(SOURCE, resources, options.model)
        self._target, self._drafter = codecs(*open_tokenizers(resources, SOURCE, name))
        runner = open_writer(SOURCE, resources, name)
        self._vocab_size = resources.vocab_size
        self._known = min(self._drafter.size, runner.spec.vocab_size)  # a padded vocabulary has ids without a text
        self._ends = frozenset(runner.spec.eos_ids)
        self._window = options.window
        self._writer = ChainWriter(runner, options.min_p)
        self._texts: dict[int, RetokenizedText] = {}
        self._bytes = StateBytes(resources.room, self._texts)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        places = [place for place, view in enumerate(views) if budgets[place] > 0 and self._follow(view)]
        draft_views = [DraftView(views[place], self._texts[views[place].sequence].ids) for place in places]
        drafts = [NO_DRAFT] * len(views)
        chains = self._writer.write(draft_views, [budgets[place] for place in places], self._choose)
        for place, chain in zip(places, chains, strict=True):
            if chain is not None:
                drafts[place] = self._draft(views[place], chain, budgets[place])
        return drafts

    def release(self, sequence: int) -> None:
        self._texts.pop(sequence, None)
        self._bytes.release(sequence)
        self._writer.release(sequence)

    def _follow(self, view: SequenceView) -> bool:
        if not self._bytes.admit(view.sequence, len(view.tokens) * TOKEN_BYTES):
            return False
        text = self._texts.get(view.sequence)
        if text is None:
            text = self._texts[view.sequence] = RetokenizedText(self._target, self._drafter, self._window)
        return text.follow(view.tokens)

    def _choose(self, logits_RV: Tensor, chains: Sequence[Chain]) -> list[tuple[int, float] | None]:
        """The likeliest ids that have a text. An id that ends a text ends the chain."""
        tops, ids = logits_RV[:, : self._known].float().softmax(-1).max(-1)
        pairs = zip(ids.tolist(), tops.tolist(), strict=True)
        return [None if token in self._ends else (token, top) for token, top in pairs]

    def _draft(self, view: SequenceView, chain: Chain, budget: int) -> Draft:
        """The chain as a draft in the target's tokens."""
        text, begins = self._text(chain)
        ids, ends = continuation(self._target, view.tokens, text, self._window)
        ids = ids[:budget]
        while ids and max(ids) >= self._vocab_size:  # a tokenizer may know more ids than its model
            ids.pop()
        drafted = list(zip(begins, chain.probabilities, strict=True))
        return trees.chain(ids, SOURCE, scores(ends[: len(ids)], drafted))

    def _text(self, chain: Chain) -> tuple[str, list[int]]:
        """The text that the chain adds, up to its last whole character, and where each of its ids begins in it."""
        latest = chain.view.tokens[-self._window :]
        before = self._drafter.decode(latest)
        texts = [self._drafter.decode([*latest, *chain.ids[:count]]) for count in range(1, len(chain.ids) + 1)]
        if not texts or not texts[-1].startswith(before):
            return "", [0] * len(texts)
        begins = [max(0, len(text) - len(before)) for text in (before, *texts[:-1])]
        return texts[-1][len(before) :].rstrip(INCOMPLETE), begins
