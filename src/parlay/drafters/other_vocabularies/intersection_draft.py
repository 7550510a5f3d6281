"""A draft model with another vocabulary, restricted to the tokens that both have (Timor et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parlay.drafters.draft_models.chains import Chain, ChainWriter, DraftView
from parlay.drafters.draft_models.opening import draft_name, open_writer
from parlay.drafters.options import INTERSECTION_DRAFT as SOURCE
from parlay.drafters.options import UNIVERSAL_DRAFT, IntersectionDraftOptions
from parlay.drafters.other_vocabularies.vocabularies import TOKEN_BYTES, Codec, codecs, intersection, open_tokenizers
from parlay.drafters.per_sequence import FromText, History
from parlay.drafters.resources import Resources
from parlay.drafters.state_room import StateBytes
from parlay.options import UsageError
from parlay.sampling.sampler import ranked
from parlay.types import NO_DRAFT, Draft, SequenceView, trees


class IntersectionDraft(FromText):
    """Token-level intersection, TLI (Timor et al. 2025, arXiv:2502.05202).

    A draft model continues each sequence with tokens that the target's vocabulary has, too. Tokens are compared by
    their bytes, so different signs for spaces do not matter. Its logits, mapped to the target's ids with -inf
    elsewhere, go through the request's own sampler and noise, so it draws the target's token as often as the coupling
    allows. The prompt is encoded again from its text. In the output, common tokens are mapped by id and the others by
    their text. Paths whose probability, within the intersection, falls below ``min_p`` are not followed. It is the
    node's score.
    """

    def __init__(self, resources: Resources, options: IntersectionDraftOptions) -> None:
        name = draft_name(SOURCE, resources, options.model)
        runner = open_writer(SOURCE, resources, name)
        tokenizers = open_tokenizers(resources, SOURCE, name)
        self._codecs = codecs(*tokenizers)
        self._vocab_size = resources.vocab_size
        common = {
            theirs: ours
            for theirs, ours in intersection(*tokenizers).items()
            if theirs < runner.spec.vocab_size and ours < resources.vocab_size
        }
        if not common:
            raise UsageError(
                f"strategy {SOURCE}: {name} and the target have no token in common: choose {UNIVERSAL_DRAFT}, which "
                "drafts by way of text"
            )
        self._to_theirs = {ours: theirs for theirs, ours in common.items()}
        self._to_ours = common
        self._theirs = torch.tensor(list(common))
        self._ours = torch.tensor(list(common.values()))
        self._writer = ChainWriter(runner, options.min_p)
        self._translations: dict[int, _Translation] = {}
        self._bytes = StateBytes(resources.room, self._translations)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        places = [place for place, budget in enumerate(budgets) if budget > 0 and self._admit(views[place])]
        draft_views = [DraftView(views[place], self._translate(views[place])) for place in places]
        drafts = [NO_DRAFT] * len(views)
        chains = self._writer.write(draft_views, [budgets[place] for place in places], self._choose)
        for place, chain in zip(places, chains, strict=True):
            if chain is not None:
                drafts[place] = trees.chain(self._path(chain), SOURCE, chain.probabilities)
        return drafts

    def release(self, sequence: int) -> None:
        self._translations.pop(sequence, None)
        self._bytes.release(sequence)
        self._writer.release(sequence)

    def _admit(self, view: SequenceView) -> bool:
        return self._bytes.admit(view.sequence, len(view.tokens) * TOKEN_BYTES)

    def _translate(self, view: SequenceView) -> list[int]:
        translation = self._translations.get(view.sequence)
        if translation is None:
            translation = self._translations[view.sequence] = _Translation(*self._codecs, self._to_theirs)
        return translation.follow(view.tokens, view.prompt_length)

    def _path(self, chain: Chain) -> list[int]:
        return [self._to_ours[token] for token in chain.ids]

    def _choose(self, logits_RV: Tensor, chains: Sequence[Chain]) -> list[tuple[int, float] | None]:
        """Draw with the request's sampler from the intersection; the result is in the draft model's ids."""
        mapped_RV = self.map(logits_RV)
        views = [chain.view.origin for chain in chains]
        drawn = ranked(mapped_RV, views, [self._path(chain) for chain in chains], 1)
        choices: list[tuple[int, float] | None] = []
        for row_V, view, tokens in zip(mapped_RV, views, drawn, strict=True):
            token = tokens[0] if tokens else -1
            probs_V = (row_V / (view.request.params.temperature or 1.0)).softmax(-1)
            choices.append((self._to_theirs[token], float(probs_V[token])) if token in self._to_theirs else None)
        return choices

    def map(self, logits_RV: Tensor) -> Tensor:
        """The draft model's logits at the target's ids, float32 ``[R, V]``; -inf for tokens that are not common."""
        mapped_RV = logits_RV.new_full((len(logits_RV), self._vocab_size), -torch.inf, dtype=torch.float32)
        mapped_RV[:, self._ours.to(logits_RV.device)] = logits_RV[:, self._theirs.to(logits_RV.device)].float()
        return mapped_RV


class _Translation:
    """A sequence of the target in the draft model's ids, updated as it grows."""

    def __init__(self, target: Codec, drafter: Codec, to_theirs: dict[int, int]) -> None:
        self._target = target
        self._drafter = drafter
        self._to_theirs = to_theirs
        self._history = History()
        self._ids: list[int] = []
        self._run: tuple[int, int] | None = (
            None  # where the last run of tokens without a counterpart begins, in tokens and in ids
        )

    def follow(self, tokens: Sequence[int], prompt_length: int) -> list[int]:
        history = self._history
        agreed = history.agree(tokens)
        if agreed < max(prompt_length, len(history.tokens)):
            history.cut(0)
            history.tokens += tokens[:prompt_length]
            self._ids[:] = self._drafter.begin(self._target.decode(tokens[:prompt_length])).ids
            self._run = None
        for place in range(len(history.tokens), len(tokens)):
            self._add(tokens, place)
        history.tokens += tokens[len(history.tokens) :]
        return self._ids

    def _add(self, tokens: Sequence[int], place: int) -> None:
        known = self._to_theirs.get(tokens[place])
        if known is not None:
            self._ids.append(known)
            self._run = None
            return
        # A character may span tokens, so the whole run is encoded again whenever it grows.
        start, first = self._run = self._run or (place, len(self._ids))
        self._ids[first:] = self._drafter.encode_piece(self._target.decode(tokens[start : place + 1]))
