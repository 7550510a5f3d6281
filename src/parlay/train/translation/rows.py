"""Rows of a training batch: sources and separators as text, then a canvas whose rows see each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3ForCausalLM

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Rows:
    """``ids_BN``: a text of ``texts_B`` tokens, then ``canvases_B`` places, then padding."""

    ids_BN: Tensor
    texts_B: Tensor
    canvases_B: Tensor

    @staticmethod
    def of(texts: Sequence[Sequence[int]], canvases: Sequence[Sequence[int]]) -> Rows:
        """Lay each canvas after its text."""
        both = [torch.tensor([*text, *canvas]) for text, canvas in zip(texts, canvases, strict=True)]
        counts = [torch.tensor([len(each) for each in part]) for part in (texts, canvases)]
        return Rows(pad_sequence(both, batch_first=True), *counts)

    @property
    def canvas_BC(self) -> Tensor:
        """Indices of the rows of the canvases, clamped to the last row where a canvas is shorter."""
        place = torch.arange(int(self.canvases_B.max()))
        return (self.texts_B[:, None] + place).clamp(max=self.ids_BN.shape[1] - 1)

    @property
    def inside_BC(self) -> Tensor:
        """Whether a canvas has such a place."""
        return torch.arange(int(self.canvases_B.max())) < self.canvases_B[:, None]

    def visible(self) -> Tensor:
        """``[B, 1, N, N]``: a row of the text sees those before it; a place sees the text and the whole canvas."""
        place = torch.arange(self.ids_BN.shape[1])
        ends_B = self.texts_B + self.canvases_B
        on_BN = (place >= self.texts_B[:, None]) & (place < ends_B[:, None])
        seen_BNN = (place[None, :] <= place[:, None])[None] | (on_BN[:, :, None] & on_BN[:, None, :])
        seen_BNN = seen_BNN & (place < ends_B[:, None])[:, None, :]
        return (seen_BNN | torch.eye(len(place), dtype=torch.bool))[:, None]


def hidden_of(model: Qwen3ForCausalLM, rows: Rows) -> Tensor:
    """The final hidden states ``[B, N, H]`` of all rows."""
    seen_B1NN = rows.visible()
    mask = torch.zeros(seen_B1NN.shape).masked_fill_(~seen_B1NN, torch.finfo(torch.float32).min)
    hidden: Tensor = model.model(input_ids=rows.ids_BN, attention_mask=mask, use_cache=False).last_hidden_state
    return hidden


def taken(hidden_BNH: Tensor, index_BC: Tensor) -> Tensor:
    """The states ``[B, C, H]`` of these rows."""
    return hidden_BNH.gather(1, index_BC[:, :, None].expand(-1, -1, hidden_BNH.shape[2]))


def padded(rows: Sequence[Sequence[int]], value: int = IGNORED) -> Tensor:
    """Rows of ids as one tensor ``[B, T]``."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)
