"""Slots of an LM head for the newest tokens of the texts; the target's verification makes up for those left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from parlay.compiled import structs
from parlay.models.compiled.matrices import pack_rows

RowsOfHead = Callable[[Sequence[int]], Tensor]
"""The LM head's rows of some tokens, uint8 ``[K, bytes]``, in the format in which it is packed."""


class NewestTokens:
    """The last outputs of a packed LM head, which stand for the newest tokens of the texts that it lacks otherwise.

    ``tokens_D`` are the tokens of all its outputs. It changes in place, as do the packed rows, between calls of the
    library.
    """

    def __init__(
        self, core: structs.Core, head: structs.Linear, tokens_D: Tensor, first: int, rows: RowsOfHead
    ) -> None:
        """The slots are the outputs from ``first`` on, which begins a panel."""
        self._core, self._head, self._rows, self.tokens_D = core, head, rows, tokens_D
        self._first = self._next = first
        self._listed = set(tokens_D.tolist())
        self._in_slots = rows(tokens_D[first:].tolist())

    def add(self, tokens: Sequence[int]) -> None:
        """Give these tokens slots; they replace the tokens that have had theirs for longest."""
        fresh = [token for token in dict.fromkeys(tokens) if token not in self._listed][-len(self._in_slots) :]
        while fresh:
            room = len(self.tokens_D) - self._next
            self._put(self._next - self._first, fresh[:room])
            self._next += len(fresh[:room])
            fresh = fresh[room:]
            if self._next == len(self.tokens_D):
                self._next = self._first

    def _put(self, slot: int, tokens: Sequence[int]) -> None:
        """Give ``tokens`` the slots from ``slot`` on, and pack the panels that have them."""
        own, panel = slice(slot, slot + len(tokens)), int(self._core.panel)
        held_D = self.tokens_D[self._first :][own]
        self._listed.difference_update(held_D.tolist())
        self._listed.update(tokens)
        held_D.copy_(torch.tensor(list(tokens)))
        self._in_slots[own] = self._rows(tokens)
        begin, end = slot - slot % panel, own.stop + -own.stop % panel
        pack_rows(self._core, self._head, self._in_slots[begin:end], self._first + begin)
