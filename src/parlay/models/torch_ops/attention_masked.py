"""Masked attention of one sequence's new rows: one fused product, keys in slot order, no exact form needed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.cache import Rows
from parlay.models.rope import Rope
from parlay.models.torch_ops.attention import Attend, positions
from parlay.models.torch_ops.attention_form import Heads, SeenPrefix
from parlay.models.torch_ops.gathered import Gathered
from parlay.types import Tree, trees


class MaskedAttention:
    """torch's scaled dot product attention; a tree is a mask. The last bits of a row may depend on the other rows."""

    def __init__(self, heads: Heads, rope: Rope) -> None:
        self._heads, self._rope = heads, rope

    def gap(self, tree: Tree) -> int:
        """Nodes follow the pending rows at once."""
        return 0

    def plan(self, rows: Gathered, place: Rows, begin: int, out: Tensor, prefix: SeenPrefix | None = None) -> Attend:
        """How one segment attends, the same in every layer: rows from ``begin`` on, into ``out`` ``[T, K * G * D]``."""
        turns = self._rope.at(positions(place))
        alone = len(out) == 1 and trees.is_chain(place.tree) and prefix is None
        mask = None if alone else _mask(place, prefix).to(rows.buffer.device)
        buffers = rows.buffer[:, :, :, : place.start + place.end].unbind(0)
        return _MaskedPlan(self._heads, turns, mask=mask, buffers=buffers, begin=begin, out=out, prefix=prefix)


class _MaskedPlan:
    """One segment's attention, ready for every layer.

    `parlay.models.torch_ops.attention` explains the letters of shapes.
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
        prefix: SeenPrefix | None,
    ) -> None:
        """``mask`` is ``[T, S]``, ``out`` ``[T, K * G * D]``, and each layer's buffer ``[2, K, S, D]``.

        With a prefix of P rows the mask is ``[T, P + S]``.

        ``turns`` are ``[T, 1, 1, P]`` for queries and ``[T, 2, 1, P]`` for keys and values.
        """
        self._heads, self._mask, self._buffers, self._prefix = heads, mask, buffers, prefix
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
        keys, values = buffer[0], buffer[1]
        if self._prefix is not None:
            keys, values = (
                torch.cat((self._prefix.keys[layer], keys), 1),
                torch.cat((self._prefix.values[layer], values), 1),
            )
        result = F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=self._mask, scale=1.0, enable_gqa=True
        )
        self._out.copy_(result[0].transpose(0, 1))


def _mask(place: Rows, prefix: SeenPrefix | None) -> Tensor:
    """``[T, start + end]``: True where a row that runs sees a slot; the rows of a prefix come before these."""
    start, pending, end = place.start, place.pending, place.end
    seen = torch.ones(end, start + end, dtype=torch.bool).tril_(start)
    if not trees.is_chain(place.tree):
        seen[pending:, start + pending :] = torch.tensor(trees.visibility(place.tree))
    seen = seen[place.base :]
    if prefix is None:
        return seen
    before = torch.zeros(len(seen), prefix.keys.shape[2], dtype=torch.bool)
    before[len(seen) - prefix.rows :] = True
    return torch.cat((before, seen), 1)
