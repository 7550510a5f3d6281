"""Masked attention of a sequence's new rows: one fused product, with keys in slot order and no exact form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.cache import Rows
from parlay.models.config import LayerForm
from parlay.models.rope import Rotations
from parlay.models.torch_ops.attention import Attend
from parlay.models.torch_ops.attention_form import AttentionKind, LayerRopes, SeenPrefix, capped, softmax_with
from parlay.models.torch_ops.step_rows import StepRows
from parlay.types import trees


class MaskedAttention:
    """torch's scaled dot product attention, with trees as masks. The last bits of a row may depend on the other
    rows."""

    def __init__(
        self, kind: AttentionKind, forms: Sequence[LayerForm], ropes: LayerRopes, sinks: Sequence[Tensor | None]
    ) -> None:
        """``forms`` and ``sinks`` (``[heads]`` or None) are those of all layers; only the layers of ``kind`` run
        here."""
        self._kind, self._forms, self._ropes, self._sinks = kind, forms, ropes, sinks

    def plan(self, rows: StepRows, place: Rows, begin: int, out: Tensor, prefix: SeenPrefix | None = None) -> Attend:
        """Plan one segment's attention, which is the same in every layer: rows from ``begin`` on, into ``out`` ``[T, K
        * G * D]``."""
        alone = len(out) == 1 and trees.is_chain(place.tree) and prefix is None
        keys = place.start + place.end
        windows = {form.window for form in self._forms}
        masks = {
            window: None
            if alone and not place.hidden[1] and (window is None or window >= keys)
            else _mask(place, prefix, window).to(rows.positions.device)
            for window in windows
        }
        return _MaskedPlan(
            self._kind,
            rows,
            rotations=self._ropes.at(rows.positions, rows.last),
            masks=[masks[form.window] for form in self._forms],
            caps=[form.score_cap for form in self._forms],
            sinks=self._sinks,
            begin=begin,
            out=out,
            prefix=prefix,
        )


class _MaskedPlan:
    """One segment's attention, prepared for every layer.

    The letters of shapes are those of `parlay.models.torch_ops.attention`.
    """

    def __init__(
        self,
        kind: AttentionKind,
        rows: StepRows,
        *,
        rotations: Sequence[Rotations],
        masks: Sequence[Tensor | None],
        caps: Sequence[float],
        sinks: Sequence[Tensor | None],
        begin: int,
        out: Tensor,
        prefix: SeenPrefix | None,
    ) -> None:
        """Each layer has its mask ``[T, S]``, or with a prefix of P rows ``[T, P + S]``; ``out`` is ``[T, K * G *
        D]``."""
        heads = kind.heads
        self._kind, self._heads, self._step, self._prefix = kind, heads, rows, prefix
        self._rotations, self._masks, self._caps, self._sinks = rotations, masks, caps, sinks
        self._rows = slice(begin, begin + len(out))
        self._out = out.view(len(out), heads.num_heads, heads.head_dim)
        self._shared: tuple[Tensor, Tensor] | None = None  # keys and values of the layer whose keys others use

    def __call__(self, layer: int, qkv_NAP: Tensor) -> None:
        heads, rotations = self._heads, self._rotations[layer]
        qkv_TAP = qkv_NAP[self._rows]
        turned = torch.view_as_real(qkv_TAP[:, : heads.num_heads] * rotations.queries[:, 0])
        if self._shared is not None and layer in self._kind.readers:
            keys, values = self._shared
        else:
            keys, values = self._keys_values(layer, qkv_TAP, rotations)
        if layer == self._kind.source:
            self._shared = keys, values
        queries = turned.flatten(-2).to(keys.dtype).transpose(0, 1)
        mask, cap, sinks = self._masks[layer], self._caps[layer], self._sinks[layer]
        result = _attend(queries, keys, values, mask=mask, cap=cap, sinks_A=sinks)
        self._out.copy_(result.transpose(0, 1))

    def _keys_values(self, layer: int, qkv_TAP: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor]:
        """The keys and values that a layer's rows see; new ones are also written to the cache."""
        heads, past = self._heads, self._step.read(layer)
        keys_values = qkv_TAP[:, heads.num_heads :].view(len(qkv_TAP), 2, heads.num_kv_heads, -1)
        new = torch.view_as_real(keys_values * rotations.keys_values).flatten(-2).permute(1, 2, 0, 3)
        new = new.to(self._step.dtype)
        self._step.write(layer, new)
        keys, values = (new if past is None else torch.cat((past, new), 2)).unbind(0)
        if self._prefix is not None:
            keys = torch.cat((self._prefix.keys[layer], keys), 1)
            values = torch.cat((self._prefix.values[layer], values), 1)
        return keys, values


def _attend(
    queries_ATD: Tensor,
    keys_KSD: Tensor,
    values_KSD: Tensor,
    *,
    mask: Tensor | None,
    cap: float,
    sinks_A: Tensor | None,
) -> Tensor:
    """Attention ``[A, T, D]``; ``mask`` is ``[T, S]``, and queries include the scale."""
    if not cap and sinks_A is None:
        whole = queries_ATD[None], keys_KSD[None], values_KSD[None]
        return F.scaled_dot_product_attention(*whole, attn_mask=mask, scale=1.0, enable_gqa=True)[0]
    group = len(queries_ATD) // len(keys_KSD)
    scores = queries_ATD @ keys_KSD.repeat_interleave(group, 0).mT
    if cap:
        scores = capped(scores, cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    sinks = None if sinks_A is None else sinks_A.to(scores.dtype)[:, None, None].expand(*scores.shape[:2], 1)
    return softmax_with(sinks, scores) @ values_KSD.repeat_interleave(group, 0)


def _mask(place: Rows, prefix: SeenPrefix | None, window: int | None) -> Tensor:
    """The mask ``[T, start + end]``, True where a row to run sees a slot; a prefix's rows come before."""
    start, pending, end = place.start, place.pending, place.end
    seen = torch.ones(end, start + end, dtype=torch.bool).tril_(start)
    if not trees.is_chain(place.tree):
        seen[pending:, start + pending :] = torch.tensor(trees.visibility(place.tree))
    if place.block:
        positions = torch.arange(start + end)
        seen = positions < (positions[start:] // place.block + 1)[:, None] * place.block
    for chain in trees.last_chains(place.tree, place.together):
        seen[pending + chain.start : pending + chain.stop] = seen[pending + chain.stop - 1]
    if window is not None:
        root = start + pending - 1
        slots = torch.tensor([*range(root + 1), *(root + depth for depth in trees.depths(place.tree))])
        seen &= slots > slots[start:, None] - window
    seen[:, slice(*place.hidden)] = False
    seen = seen[place.base :]
    if prefix is None:
        return seen
    before = torch.zeros(len(seen), prefix.keys.shape[2], dtype=torch.bool)
    before[len(seen) - prefix.rows :] = True
    return torch.cat((before, seen), 1)
