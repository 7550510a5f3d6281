"""Masked attention of one sequence's new rows: one fused product, keys in slot order, no exact form needed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay import trees
from parlay.cache import Rows
from parlay.models.attention import Attend, positions
from parlay.models.attention_form import Heads
from parlay.models.gathered import Gathered
from parlay.models.rope import Rope
from parlay.types import Tree


class MaskedAttention:
    """torch's scaled dot product attention; a tree is a mask. The last bits of a row may depend on the other rows."""

    def __init__(self, heads: Heads, rope: Rope) -> None:
        self._heads, self._rope = heads, rope

    def gap(self, tree: Tree) -> int:
        """Nodes follow the pending rows at once."""
        return 0

    def plan(self, rows: Gathered, place: Rows, begin: int, out: Tensor) -> Attend:
        """How one segment attends, the same in every layer: rows from ``begin`` on, into ``out`` ``[T, K * G * D]``."""
        turns = self._rope.at(positions(place))
        mask = _mask(place).to(rows.buffer.device) if len(out) > 1 or not trees.is_chain(place.tree) else None
        buffers = rows.buffer[:, :, :, : place.start + place.end].unbind(0)
        return _MaskedPlan(self._heads, turns, mask=mask, buffers=buffers, begin=begin, out=out)


class _MaskedPlan:
    """One segment's attention, ready for every layer.

    `parlay.models.attention` explains the letters of shapes.
    """

    def __init__(
        self,
        heads: Heads,
        turns: tuple[Tensor, Tensor],
        *,
        mask: Tensor | None,
        buffers: tuple[Tensor, ...],
        begin: int,
        out: Tensor,
    ) -> None:
        """``mask`` is ``[T, S]``, ``out`` ``[T, K * G * D]``, and each layer's buffer ``[2, K, S, D]``.

        ``turns`` are ``[T, 1, 1, P]`` for queries and ``[T, 2, 1, P]`` for keys and values.
        """
        self._heads, self._mask, self._buffers = heads, mask, buffers
        self._query_turns, self._kv_turns = turns
        self._rows = slice(begin, begin + len(out))
        self._out = out.view(len(out), heads.num_heads, heads.head_dim)

    def __call__(self, layer: int, qkv_NAP: Tensor) -> None:
        heads, buffer = self._heads, self._buffers[layer]
        qkv_TAP = qkv_NAP[self._rows]
        count = len(qkv_TAP)
        turned = torch.view_as_real(qkv_TAP[:, : heads.num_heads] * self._query_turns[:, 0])
        queries = turned.flatten(-2).to(buffer.dtype).transpose(0, 1)
        keys_values = qkv_TAP[:, heads.num_heads :].view(count, 2, heads.num_kv_heads, -1) * self._kv_turns
        buffer[:, :, buffer.shape[2] - count :] = torch.view_as_real(keys_values).flatten(-2).permute(1, 2, 0, 3)
        result = F.scaled_dot_product_attention(
            queries[None], buffer[0][None], buffer[1][None], attn_mask=self._mask, scale=1.0, enable_gqa=True
        )
        self._out.copy_(result[0].transpose(0, 1))


def _mask(place: Rows) -> Tensor:
    """``[T, start + end]``: True where a row that runs sees a slot."""
    start, pending, end = place.start, place.pending, place.end
    seen = torch.ones(end, start + end, dtype=torch.bool).tril_(start)
    if not trees.is_chain(place.tree):
        seen[pending:, start + pending :] = torch.tensor(trees.visibility(place.tree))
    return seen[place.base :]
