"""Finds by trying how batched products must be padded so that a row does not depend on the other rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.models.config import DecoderConfig
from parlay.models.rope import Rope, Rotations
from parlay.types import Prefix

SERIAL = 32_768
"""torch splits elementwise work on more elements between threads, even within a row."""


@dataclass(frozen=True, slots=True)
class Heads:
    """``num_heads`` query heads, ``group`` of them per key-value head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_heads(self) -> int:
        return self.num_heads + 2 * self.num_kv_heads


class LayerRopes:
    """The rotations of each layer; layers with the same form share them."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._kinds = [(form.rope, config.heads_of(form).size, form.scale) for form in config.forms]
        self._ropes = {kind: Rope(*kind[:2], dtype, device, kind[2]) for kind in self._kinds}

    def at(self, positions_T: Tensor, last: int) -> list[Rotations]:
        """Rotations at these int64 positions for each layer; ``last`` is the largest position."""
        found = {kind: rope.at(positions_T, last) for kind, rope in self._ropes.items()}
        return [found[kind] for kind in self._kinds]

    def room(self, rows: int) -> list[Rotations]:
        """Allocate rotations of ``rows`` rows for each layer; layers with the same form share them."""
        found = {kind: rope.room(rows) for kind, rope in self._ropes.items()}
        return [found[kind] for kind in self._kinds]

    def fill(self, room: Sequence[Rotations], positions_T: Tensor, last: int) -> None:
        """Write the result of `at` to the first rows of the result of `room`."""
        for kind, own in dict(zip(self._kinds, room, strict=True)).items():
            self._ropes[kind].fill(own, positions_T, last)


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Layers that attend with the same heads: all such layers, or ``source`` and its ``readers``.

    The readers use the source's keys and store none.
    """

    heads: Heads
    source: int | None = None
    readers: frozenset[int] = frozenset()


def attention_kinds(config: DecoderConfig) -> list[AttentionKind]:
    """The kind of each layer."""
    readers: dict[int, list[int]] = {}
    for layer, form in enumerate(config.forms):
        readers.setdefault(layer if form.keys_of is None else form.keys_of, []).append(layer)
    kinds = {}
    for source, layers in readers.items():
        heads = Heads(config.num_heads, *config.heads_of(config.forms[source]))
        alone = len(layers) == 1
        kind = AttentionKind(heads) if alone else AttentionKind(heads, source, frozenset(layers) - {source})
        kinds.update(dict.fromkeys(layers, kind))
    return [kinds[layer] for layer in range(config.num_layers)]


def capped(scores: Tensor, cap: float) -> Tensor:
    """``cap`` * tanh(score / cap) of ``scores``, of any shape, in place if they are contiguous.

    It works in parts that torch does not split between threads, as tanh rounds differently at the end of a part.
    """
    scores = scores.contiguous()
    for part in torch.split(scores.view(-1), SERIAL // 2):
        part.div_(cap).tanh_().mul_(cap)
    return scores


def softmax_with(sinks: Tensor | None, scores: Tensor) -> Tensor:
    """Softmax of ``scores`` ``[..., S]``; ``sinks`` ``[..., 1]`` take part of the weight and contribute no value."""
    if sinks is None:
        return torch.softmax(scores, -1)
    return torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1].contiguous()


class SeenPrefix(NamedTuple):
    """Keys and values ``[L, K, P, D]`` of a trained prefix, which the last ``rows`` rows of a segment see besides their
    path.

    Keys are in rotation order, but not rotated.
    """

    keys: Tensor
    values: Tensor
    rows: int


def prefix_of(prefix: Prefix, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The keys and values of a `SeenPrefix`."""
    keys, values = prefix.states.to(device, dtype).unbind(1)
    pairs = keys.reshape(*keys.shape[:-1], 2, -1).transpose(-1, -2)  # halves to pairs, as `interleave` orders weights
    return pairs.flatten(-2).contiguous(), values.contiguous()


@dataclass(frozen=True, slots=True)
class Form:
    """Multiples to which a batched product's rows and keys are padded; 1 means no padding."""

    rows: int
    keys: int


_FORMS = (Form(4, 192), Form(8, 192), Form(16, 192), Form(8, 256), Form(16, 256), Form(16, 384), Form(16, 512))
"""Tried in this order, cheapest first. (4, 192) works in MKL on AMD Zen 4, with AVX-512 and AVX2, with one and two
threads."""


def choose_form(heads: frozenset[Heads], dtype: torch.dtype) -> Form | None:
    """The first form in which a product's rows do not depend on the number of rows and masked keys; None if there is
    none.

    ``heads`` are those of all layers.
    """
    return _choose_form(heads, dtype, torch.get_num_threads())


@lru_cache
def _choose_form(heads: frozenset[Heads], dtype: torch.dtype, threads: int) -> Form | None:
    return next((form for form in _FORMS if all(_holds(each, dtype, form) for each in heads)), None)


def _holds(heads: Heads, dtype: torch.dtype, form: Form) -> bool:
    """Whether products of random numbers with some multiples of rows and keys equal the largest one."""
    generator = torch.Generator().manual_seed(0)
    row_counts = [form.rows * count for count in (1, 2, 3, 5, 8, 16)]
    key_counts = [form.keys * count for count in (1, 2, 3, 4, 5, 7)]
    shape = (heads.num_kv_heads, key_counts[-1] + form.keys, heads.head_dim)
    keys, values, queries = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    queries = queries[:, : row_counts[-1]].contiguous()
    whole = torch.bmm(queries, keys[:, : key_counts[-1]].transpose(1, 2))
    for count in key_counts:
        weights = torch.softmax(whole[:, :, :count], -1)
        expected = torch.bmm(F.pad(weights, (0, key_counts[-1] - count)), values[:, : key_counts[-1]])
        for rows in row_counts:
            scores = torch.bmm(queries[:, :rows], keys[:, :count].transpose(1, 2))
            if not torch.equal(scores, whole[:, :rows, :count]):
                return False
            if not torch.equal(torch.bmm(weights[:, :rows].contiguous(), values[:, :count]), expected[:, :rows]):
                return False
    return True
