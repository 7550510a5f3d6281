"""Says which models the library can run, and why not the others."""

from __future__ import annotations

import torch

from parlay.cache.pages import CODES
from parlay.compiled import structs
from parlay.compiled.library import NotLoaded, load
from parlay.models.config import DecoderConfig, Experts

_MOST_GROUP, _MOST_HEAD = 64, 512
"""The library's limits: query heads per key head, and head size."""


def refusal(config: DecoderConfig, dtype: torch.dtype, cached: str = "auto") -> str | None:
    """Why the library can't run this model, or not with this type of cached keys and values; None if it can."""
    heads = {config.heads_of(form) for form in config.forms}
    sizes, odd = sorted({size for _, size in heads}), [size for _, size in heads if size % CODES]
    if cached == "q8_0" and odd:
        return f"it rounds keys and values in blocks of {CODES} numbers, and heads have {odd[0]}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"it computes in float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if any(size % 2 for size in sizes) or sizes[-1] > _MOST_HEAD:
        return f"it takes heads of an even size up to {_MOST_HEAD}, not {sizes[-1]}"
    if any(size % 2 for size in (config.hidden_size, config.per_layer_size, *map(config.mlp_size_of, config.forms))):
        return "it takes hidden and feed-forward sizes that are even"
    if config.num_heads // min(count for count, _ in heads) > _MOST_GROUP:
        return f"it takes up to {_MOST_GROUP} query heads per key head"
    return next((reason for form in config.layers if (reason := _refusal_of_experts(form.experts))), None)


def _refusal_of_experts(experts: Experts | None) -> str | None:
    """Why the library can't run these experts; None if it can."""
    if experts is None:
        return None
    shared = int(experts.shared > 0)
    if experts.count + shared > structs.MOST_EXPERTS or experts.chosen + shared > structs.MOST_CHOSEN:
        return f"it takes up to {structs.MOST_EXPERTS} experts, of which a row runs up to {structs.MOST_CHOSEN}"
    return "it takes experts of even sizes" if experts.size % 2 or experts.shared % 2 else None


def runs_here(config: DecoderConfig, dtype: torch.dtype) -> bool:
    """Whether the library is loaded and can run this model."""
    try:
        load()
    except NotLoaded:
        return False
    return refusal(config, dtype) is None
