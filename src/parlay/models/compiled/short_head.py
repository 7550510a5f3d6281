"""A draft model's LM head over a short list of tokens; the target's verification makes up for those left out."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from parlay.compiled import structs
from parlay.models.compiled.matrices import pack_rows
from parlay.models.compiled.memory import WeightArena
from parlay.models.compiled.newest_tokens import NewestTokens
from parlay.models.compiled.weights import Weights
from parlay.models.weights.formats import Format
from parlay.models.weights.quantize import fits_blocks, in_q8_0

_NEWEST = 4096
"""Slots for tokens of the texts that are not among the frequent ones."""
_PART = 1024
"""Rows packed at a time, in whole panels."""
_PLAIN = (Format.F32.number, Format.F16.number, Format.BF16.number)


class ShortHead:
    """A model whose LM head has only the ``frequent`` tokens and the newest tokens of its texts; with 0 it has all
    tokens.

    The frequent tokens are those with the lowest ids, as tokenizers number the most frequent tokens of their training
    text first. Rows are kept in Q8_0, or in bfloat16 if they don't fill whole blocks.
    """

    def __init__(self, core: structs.Core, weights: Weights, frequent: int) -> None:
        self._core, self._weights, self._panel = core, weights, int(core.panel)
        self.newest: NewestTokens | None = None
        self.model = structs.ModelStruct.from_buffer_copy(weights.model)
        vocab = int(self.model.vocab)
        source = _rows_of_head(weights)
        count = frequent - frequent % -self._panel + _NEWEST
        if not frequent or count >= vocab or source is None:
            self.tokens_D = torch.arange(vocab)
            return
        self.tokens_D = torch.arange(count)
        self._lay_out(int(self.model.hidden), count)
        rows = partial(_rows_of, core, source, self._format)
        if source.kind == self._format.number and source.panels and not source.scale:  # packed in the same way
            ctypes.memmove(self.model.head.panels, source.panels, count // self._panel * self._panel_bytes)
        else:
            for first in range(0, count, _PART):
                pack_rows(core, self.model.head, rows(range(first, min(first + _PART, count))), first)
        self.newest = NewestTokens(core, self.model.head, self.tokens_D, count - _NEWEST, rows)

    def _lay_out(self, hidden: int, count: int) -> None:
        """Allocate the packed rows, and point the model's head at them."""
        blocks = fits_blocks(torch.empty(0, hidden))
        self._format = Format.Q8_0 if blocks else Format.BF16
        self._panel_bytes = int(self._core.panel_bytes(self._format.number, hidden))
        self._memory = WeightArena()
        panels = self._memory.take(count // self._panel * self._panel_bytes)
        self.model.head = structs.Linear(panels=panels, inputs=hidden, outputs=count, kind=self._format.number)
        self.model.vocab = count

    def __del__(self) -> None:
        self._core.rest()  # a late thread may still read the rows


def _rows_of_head(weights: Weights) -> structs.Linear | None:
    """The matrix from which single rows of the LM head can be read; None if there is none, as packed plain numbers
    don't allow it."""
    head: structs.Linear = weights.model.embedding if weights.tied else weights.model.head
    return None if not weights.tied and (head.kind in _PLAIN or head.scale or head.order) else head


def _rows_of(core: structs.Core, head: structs.Linear, form: Format, tokens: Sequence[int]) -> Tensor:
    """The LM head's rows of these tokens, uint8, in the format ``form``."""
    rows_KH = torch.empty(len(tokens), int(head.inputs))
    for row, token in zip(rows_KH, tokens, strict=True):
        core.read(ctypes.byref(head), token, row.data_ptr())
    return in_q8_0(rows_KH).data if form is Format.Q8_0 else rows_KH.to(torch.bfloat16).view(torch.uint8)
