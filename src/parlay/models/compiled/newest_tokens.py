"""Slots of an LM head for the newest tokens of the texts; the target's verification makes up for those left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parlay.compiled import structs
from parlay.models.compiled.matrices import pack_rows

RowsOfHead = Callable[[Sequence[int]], Tensor]
"""The LM head's rows of some tokens, uint8 ``[K, bytes]``, in the format in which it is packed."""

_EVERYBODY = 0
"""The tenant of tokens that all texts may draft."""


def tenant(salt: str) -> int:
    """The number of the tenant whose requests have this salt."""
    return hash(salt) | 1  # never _EVERYBODY


class NewestTokens:
    """The last outputs of a packed LM head, which stand for the newest tokens of the texts that it lacks otherwise.

    ``tokens_D`` are the tokens of all its outputs, and ``tenants_S``, int64, has the tenant of each slot's token: no
    other tenant's text may draft it, because its speed would tell what others wrote. Both change in place, as do the
    packed rows, between calls of the library.
    """

    def __init__(
        self, core: structs.Core, head: structs.Linear, tokens_D: Tensor, first: int, rows: RowsOfHead
    ) -> None:
        """The slots are the outputs from ``first`` on, which begins a panel. At first everybody may draft them."""
        self._core, self._head, self._rows, self.tokens_D = core, head, rows, tokens_D
        self._first, self._next, self.slots = first, 0, len(tokens_D) - first
        self._listed = {(_EVERYBODY, token) for token in tokens_D.tolist()}
        self._in_slots = rows(tokens_D[first:].tolist())
        self.tenants_S = torch.full((self.slots,), _EVERYBODY, dtype=torch.int64)

    def add(self, tokens: Sequence[int], salt: str) -> None:
        """Give tokens of a text with this salt slots; they replace the tokens that have had theirs for longest."""
        own, listed, slots = tenant(salt), self._listed, self.slots
        lacking = [each for each in dict.fromkeys(tokens) if listed.isdisjoint(((_EVERYBODY, each), (own, each)))]
        fresh = lacking[-slots:]
        while fresh:
            placed = fresh[: slots - self._next]
            self._put(self._next, placed, own)
            self._next = (self._next + len(placed)) % slots
            fresh = fresh[len(placed) :]

    def _put(self, slot: int, tokens: Sequence[int], own: int) -> None:
        """Give ``tokens`` the slots from ``slot`` on, and pack the panels that have them."""
        placed, panel = slice(slot, slot + len(tokens)), int(self._core.panel)
        held_K, tenants_K = self.tokens_D[self._first :][placed], self.tenants_S[placed]
        self._listed.difference_update(zip(tenants_K.tolist(), held_K.tolist(), strict=True))
        self._listed.update((own, token) for token in tokens)
        held_K.copy_(torch.tensor(list(tokens)))
        tenants_K.fill_(own)
        self._in_slots[placed] = self._rows(tokens)
        begin, end = slot - slot % panel, placed.stop + -placed.stop % panel
        pack_rows(self._core, self._head, self._in_slots[begin:end], self._first + begin)
