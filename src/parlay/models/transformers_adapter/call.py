"""One forward of a transformers model on rows of a cached sequence, adapted to its forward's arguments."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin

from parlay.models.config import UnsupportedModel
from parlay.models.slots import CallRows
from parlay.types import Output

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names of the forward's cache argument: since transformers 5.24, before that, and of recurrent models."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """``logits_RV`` of the last rows asked for, and the hidden states ``[N, H]`` of all rows at each layer boundary."""

    logits_RV: Tensor
    hidden: tuple[Tensor, ...] = ()


def output_of(results: Sequence[CallResult], taps: Sequence[int]) -> Output:
    """The output of a forward whose segments have these results, with the hidden states of the tapped layers."""
    starts = [0, *accumulate(len(result.logits_RV) for result in results)]
    tapped = {layer: torch.cat([result.hidden[layer] for result in results]) for layer in taps}
    return Output(torch.cat([result.logits_RV for result in results]), tuple(starts), tapped)


class ModelCall:
    """Runs rows through a model and its cache, and knows the arguments of the model's forward.

    Raises UnsupportedModel for an encoder-decoder, and for a model whose forward takes no cache object.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.name = type(model).__name__
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        accepted = inspect.signature(model.forward).parameters
        if model.config.is_encoder_decoder:
            raise UnsupportedModel(f"{self.name}: encoder-decoder models are not supported")
        self._cache_argument = cache_argument(self.name, accepted)
        self.takes_positions = "position_ids" in accepted
        self._takes_kept = "logits_to_keep" in accepted

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def cached_by(self, cache: Cache) -> dict[str, Cache]:
        """The argument with the model's cache."""
        return {self._cache_argument: cache}

    def kept_rows(self, wanted: Sequence[int]) -> dict[str, Tensor]:
        """The argument that limits the LM head to the wanted rows (at least one); empty if the model has none."""
        if not self._takes_kept:
            return {}
        return {"logits_to_keep": torch.tensor(list(wanted) or [0], device=self.device)}

    def full(self, tokens: Sequence[int]) -> Tensor:
        """The logits ``[N, V]`` of a plain forward over the whole text, without a cache."""
        logits_BNV: Tensor = self.model(input_ids=self._ids([tokens]), use_cache=False).logits
        return logits_BNV[0]

    def chain(self, rows: CallRows, cache: DynamicCache, wanted: int, hidden: bool = False) -> CallResult:
        """Run rows without branches, with the model's own mask; returns the logits of the last ``wanted`` rows.
        ``cache`` grows."""
        options: dict[str, Any] = {"logits_to_keep": max(wanted, 1)} if self._takes_kept else {}
        if self.takes_positions:
            options["position_ids"] = torch.tensor([rows.positions], device=self.device)
        out = self._run([rows.tokens], cache, hidden, options)
        return _result(out, 0, len(rows.tokens), wanted)

    def branched(self, batch: Sequence[CallRows], cache: DynamicCache, hidden: bool = False) -> list[CallResult]:
        """Run trees of one or several sequences, with our own mask; returns the logits of all rows. ``cache``, which is
        padded to its longest sequence, grows."""
        width = max(len(rows.tokens) for rows in batch)
        positions = [_filled(rows.positions, width) for rows in batch]
        options = {
            "position_ids": torch.tensor(positions, device=self.device),
            "attention_mask": additive_mask(batch, self.dtype).to(self.device),
        }
        out = self._run([_filled(rows.tokens, width) for rows in batch], cache, hidden, options)
        return [_result(out, index, len(rows.tokens), len(rows.tokens)) for index, rows in enumerate(batch)]

    def _run(self, tokens: Sequence[Sequence[int]], cache: DynamicCache, hidden: bool, options: dict[str, Any]) -> Any:
        options |= self.cached_by(cache)
        return self.model(input_ids=self._ids(tokens), use_cache=True, output_hidden_states=hidden, **options)

    def _ids(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([list(row) for row in tokens], device=self.device)


def cache_argument(name: str, accepted: Container[str]) -> str:
    """The name of the forward's cache argument: `cache` since transformers 5.24.

    Raises UnsupportedModel, naming the model, if it takes none.
    """
    for argument in CACHE_ARGUMENTS:
        if argument in accepted:
            return argument
    raise UnsupportedModel(f"{name}: its forward takes no cache ({', '.join(CACHE_ARGUMENTS)})")


def _filled(numbers: Sequence[int], width: int) -> list[int]:
    return [*numbers, *[0] * (width - len(numbers))]


def _result(out: Any, index: int, count: int, wanted: int) -> CallResult:
    """The result of sequence ``index`` of a batch: logits of its last ``wanted`` of ``count`` rows, and all its hidden
    states."""
    logits_RV = out.logits[index]
    logits_RV = logits_RV[:count] if len(logits_RV) >= count else logits_RV
    layers = out.hidden_states or ()
    return CallResult(logits_RV[len(logits_RV) - wanted :], tuple(layer_BNH[index, :count] for layer_BNH in layers))


def additive_mask(batch: Sequence[CallRows], dtype: torch.dtype) -> Tensor:
    """A mask ``[B, 1, R, L + R]``: 0 where a row sees a key, the dtype's lowest number elsewhere.

    Keys are the cache's, padded to its longest sequence L, then the rows'. Padding rows see only themselves.
    """
    longest = max(rows.cached + rows.base for rows in batch)
    width = max(len(rows.tokens) for rows in batch)
    seen = torch.zeros(len(batch), 1, width, longest + width, dtype=torch.bool)
    for index, rows in enumerate(batch):
        count, visible = len(rows.tokens), rows.visible()
        view, own = seen[index, 0], seen[index, 0, :, longest:]
        view[:count, : rows.cached] = True
        view[:count, rows.cached : rows.cached + rows.base] = visible[:, : rows.base]
        own[:count, :count] = visible[:, rows.base :]
        own[count:, count:] = torch.eye(width - count, dtype=torch.bool)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


# ------------------------------------------------------------------------------------------------------------ caches


def rows_selectable(cache: DynamicCache) -> bool:
    """Whether the cache consists of the keys and values of every token, so that any of its rows can be dropped."""
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def holds_tokens(cache: Cache) -> bool:
    """Whether a forward has written to the cache: keys and values, or the states of recurrent layers."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin) and any(layer.has_previous_state.values()):
            return True
        if isinstance(layer, CacheLayerMixin) and layer.get_seq_length() > 0:
            return True
    return False


def copied(cache: DynamicCache) -> DynamicCache:
    """Copy a cache; the original does not change when the copy grows.

    Key-value layers replace their tensors when they grow, so only the layer object is copied; recurrent layers write in
    place, so their states are copied, too.
    """
    twin = copy.copy(cache)
    twin.layers = [
        copy.deepcopy(layer) if isinstance(layer, LinearAttentionCacheLayerMixin) else copy.copy(layer)
        for layer in cache.layers
    ]
    return twin


def select(cache: DynamicCache, index: int, kept: Sequence[int]) -> DynamicCache:
    """A cache with only the rows ``kept``, in rising order, of sequence ``index``."""
    chosen = copy.copy(cache)
    chosen.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in chosen.layers:
        if layer.is_initialized:
            layer.keys = _chosen_rows(layer.keys[index : index + 1], kept)
            layer.values = _chosen_rows(layer.values[index : index + 1], kept)
    return chosen


def _chosen_rows(states_BHLD: Tensor, kept: Sequence[int]) -> Tensor:
    """Select rows; if they are a prefix this is a view, which the next forward copies anyway."""
    if not kept or kept[-1] == len(kept) - 1:
        return states_BHLD[:, :, : len(kept)]
    return states_BHLD.index_select(2, torch.tensor(kept, device=states_BHLD.device))


def join(caches: Sequence[DynamicCache], lengths: Sequence[int]) -> DynamicCache:
    """Join the caches of several sequences to a batch, padded at the end to the longest. All lengths must be above
    zero."""
    longest = max(lengths)
    joined = copy.copy(caches[0])
    joined.layers = [copy.copy(layer) for layer in caches[0].layers]
    for index, layer in enumerate(joined.layers):
        layer.keys = torch.cat([_padded(cache.layers[index].keys, longest) for cache in caches])
        layer.values = torch.cat([_padded(cache.layers[index].values, longest) for cache in caches])
    return joined


def _padded(states_BHLD: Tensor, longest: int) -> Tensor:
    return torch.nn.functional.pad(states_BHLD, (0, 0, 0, longest - states_BHLD.shape[2]))
