"""Decides whether Triton's kernels compute attention over pages, by a trial for each shape of heads."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from parlay.cache import BLOCK, Rows
from parlay.cache.pages import Page, PageTable, pages_for
from parlay.compiled import triton_here
from parlay.models.config import DecoderConfig, LayerForm
from parlay.models.forward import LayerPages
from parlay.models.torch_ops.attention_form import AttentionKind, Heads, LayerRopes
from parlay.models.torch_ops.attention_masked import MaskedAttention
from parlay.models.torch_ops.step_rows import step_rows
from parlay.models.triton_ops.attention import PagedAttention, PageKernels
from parlay.models.triton_ops.row_table import PlacedRows
from parlay.types import Tree

_log = logging.getLogger(__name__)

_NEAR = {torch.float64: 1e-9, torch.float32: 1e-4}
_ROUGH = 5e-2
"""Tolerances of the comparison with torch, by dtype, and for less precise dtypes."""
_TREE = Tree((0,) * 6, (-1, 0, -1, 2, 2, 1))
_START, _PENDING = 37, 3
"""The trial's rows: a tree below pending rows, after a text that ends within a page."""


def paged_attention(
    config: DecoderConfig,
    kinds: Sequence[AttentionKind],
    ropes: LayerRopes,
    sinks: Sequence[Tensor | None],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> PagedAttention | None:
    """Make attention over pages for a model's layers; None if torch's attention must be used.

    The kernels are compiled and compared with torch's attention on a small tree for each kind of layer. If that fails,
    one line is logged.
    """
    if not triton_here.asked_for(device):
        return None
    trials = {(form, kind.heads, own is not None) for form, kind, own in zip(config.forms, kinds, sinks, strict=True)}
    try:
        triton_here.check()
        from parlay.models.triton_ops import kernels  # here, as it needs Triton

        for form, heads, has_sinks in trials:
            _try(kernels, config, form, heads, dtype=dtype, device=device, has_sinks=has_sinks)
    except Exception as error:
        _warn_once(triton_here.reason(error))
        return None
    pages = LayerPages.of(config)
    return PagedAttention(kinds, config.forms, ropes, sinks, pages=pages, kernels=kernels, dtype=dtype, device=device)


def _try(
    kernels: PageKernels,
    config: DecoderConfig,
    form: LayerForm,
    heads: Heads,
    *,
    dtype: torch.dtype,
    device: torch.device,
    has_sinks: bool,
) -> None:
    """Compute a small tree's rows with both attentions. Raises ArithmeticError if the results differ."""
    form = replace(form, kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, keys_of=None)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    ropes = LayerRopes(replace(config, num_layers=1, layers=(form,)), compute, device)
    chance = torch.Generator().manual_seed(0)
    sinks = [torch.randn(heads.num_heads, generator=chance).to(device) if has_sinks else None]
    kind, pages = AttentionKind(heads), LayerPages.alike(1)
    place = Rows(_random_pages(heads, dtype, device, chance), _START, _PENDING, _TREE)
    numbers = torch.randn(place.end, heads.qkv_heads, heads.head_dim // 2, 2, generator=chance, dtype=compute)
    qkv = torch.view_as_complex(numbers.to(device))
    ours, torchs = torch.zeros(2, place.end, heads.num_heads * heads.head_dim, dtype=dtype, device=device)
    paged = PagedAttention([kind], [form], ropes, sinks, pages=pages, kernels=kernels, dtype=dtype, device=device)
    paged.plan([PlacedRows(0, place)], {heads: ours})(0, qkv)
    MaskedAttention(kind, [form], ropes, sinks).plan(step_rows(place, device, pages), place, 0, torchs)(0, qkv)
    furthest = float((ours.double() - torchs.double()).abs().max())
    if not furthest <= _NEAR.get(dtype, _ROUGH):
        raise ArithmeticError(f"its results are {furthest:.2g} from torch's for {heads} and {form}")


def _random_pages(heads: Heads, dtype: torch.dtype, device: torch.device, chance: torch.Generator) -> PageTable:
    """Pages with room for the trial's rows, in one slab and out of order."""
    count = pages_for(_START + _PENDING + len(_TREE))
    slab = torch.randn(1, 2, heads.num_kv_heads, count, BLOCK, heads.head_dim, generator=chance).to(device, dtype)
    table = PageTable()
    for number in reversed(range(count)):
        table.append(Page(slab, number))
    return table


@lru_cache
def _warn_once(reason: str) -> None:
    _log.warning("no attention over pages by Triton: %s; torch's attention runs instead, which takes longer", reason)
