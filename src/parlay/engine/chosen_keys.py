"""Chooses which cached keys a sequence's draft passes attend to: those that its last rows attended to most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from parlay.types import PAGE_TOKENS, ChosenPages, DraftForm

VOTERS = 8
"""How many of the last cached rows vote. They run once more to do so."""


class CachedText(Protocol):
    """A text of which the first ``cached`` tokens are in the KV cache."""

    tokens: list[int]
    cached: int


@dataclass(slots=True, eq=False)
class ChosenKeys:
    """The choice for one sequence: ``pages`` for ``form``, made when the text had ``length`` tokens.

    The attention of the last queries chooses for each head of each layer, as in SnapKV (Li et al. 2024,
    arXiv:2404.14469). Whole pages of the cache are chosen, as in Quest (Tang et al. 2024, arXiv:2406.10774). MagicDec
    (arXiv:2408.11049) drafts with keys chosen in this way.
    """

    pages: ChosenPages | None = None
    form: DraftForm | None = None
    length: int = 0

    def is_due(self, form: DraftForm, text: CachedText) -> bool:
        """Whether keys must be chosen anew: other tokens are hidden now, or ``refresh`` tokens have been added."""
        hidden = form.hidden(text.cached)
        if not hidden[1]:
            return False
        if self.pages is None or self.form != form or self.pages.hidden != hidden:
            return True
        return 0 < form.refresh <= len(text.tokens) - self.length

    def choose(self, votes_LKTP: Tensor, form: DraftForm, text: CachedText) -> None:
        """Choose pages by ``votes_LKTP``, the attention of T rows to each page; see `Output`."""
        hidden = form.hidden(text.cached)
        first, end = (place // PAGE_TOKENS for place in hidden)
        wanted = -(-form.keys // PAGE_TOKENS)
        best_LKC = votes_LKTP.sum(2)[:, :, first:end].topk(wanted).indices + first
        self.pages = ChosenPages(best_LKC.sort().values.to(torch.int32).contiguous(), hidden)
        self.form, self.length = form, len(text.tokens)
