"""Which cached keys the drafts of a sequence see: those to which its last rows paid most attention, by votes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from parlay.types import PAGE_TOKENS, ChosenPages, DraftForm

VOTERS = 8
"""The last cached rows that vote, which run once more for that."""


class CachedText(Protocol):
    """A text of which so many tokens are cached."""

    tokens: list[int]
    cached: int


@dataclass(slots=True, eq=False)
class ChosenKeys:
    """The choice of one sequence: ``pages`` for ``form``, when the text had ``length`` tokens.

    Votes of the last queries choose for each head of each layer, as in SnapKV (Li et al. 2024, arXiv:2404.14469), and
    they choose whole pages of the cache, as in Quest (Tang et al. 2024, arXiv:2406.10774). MagicDec (arXiv:2408.11049)
    drafts so.
    """

    pages: ChosenPages | None = None
    form: DraftForm | None = None
    length: int = 0

    def is_due(self, form: DraftForm, text: CachedText) -> bool:
        """Whether drafts in this form need another choice: tokens are hidden that were not, or ``refresh`` are new."""
        hidden = form.hidden(text.cached)
        if not hidden[1]:
            return False
        if self.pages is None or self.form != form or self.pages.hidden != hidden:
            return True
        return 0 < form.refresh <= len(text.tokens) - self.length

    def choose(self, votes_LKTP: Tensor, form: DraftForm, text: CachedText) -> None:
        """Choose pages by votes as `Output` has them."""
        hidden = form.hidden(text.cached)
        first, end = (place // PAGE_TOKENS for place in hidden)
        wanted = -(-form.keys // PAGE_TOKENS)
        best_LKC = votes_LKTP.sum(2)[:, :, first:end].topk(wanted).indices + first
        self.pages = ChosenPages(best_LKC.sort().values.to(torch.int32).contiguous(), hidden)
        self.form, self.length = form, len(text.tokens)
