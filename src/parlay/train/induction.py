"""A start from which a model copies: an induction circuit planted into the random weights of its first two layers.

Copying stands on induction heads (Olsson et al. 2022, arXiv:2209.11895), and a run of a few million tokens ends before
they form by themselves. So they are written down: heads of layer 0 attend one, two, ... eight tokens back and store
the codes found there beside the token; heads of layer 1 compare the last eight codes with those stored elsewhere, and
copy the token of the place that fits best, which is what came next last time. Eight tokens rather than one, because in
real text most tokens occur many times; and after a token that was changed, the others still fit. Training goes on from
there like from any other start.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

_CONSTANT = 1.0  # residual dimension 0 holds this for every token: what position-only queries are made of
_EMBEDDING_STD = 0.5  # large, or what the layers learn to write soon drowns the token itself
_NORM_BEFORE, _NORM_MATCH = 2.5, 2.2  # query and key norm weights: how sharp the heads of layers 0 and 1 are
_STORE, _COPY, _FINAL = 0.5, 2.5, 0.16
_FURTHEST = 8  # tokens back
_FADE = 0.05  # by how much less a fit counts for each token further back
_FIRM = 2.0  # size of query and key rows: the head normalises it away, training turns large rows more slowly


@dataclass(frozen=True, slots=True)
class Layout:
    """Residual dimensions: 0 a constant, then a slot per earlier token, the rest the token itself."""

    slot: int
    slots: int
    width: int

    @classmethod
    def of(cls, config: Qwen3Config) -> Layout:
        """A slot for each head that looks back, together at most a fourth of the width."""
        slots = min(_FURTHEST, config.num_attention_heads)
        return cls(min(config.head_dim, config.hidden_size // (4 * slots)), slots, config.hidden_size)

    @property
    def token(self) -> slice:
        """Where the token is."""
        return slice(1 + self.slot * self.slots, self.width)

    def place(self, back: int) -> slice:
        """Where the code of the token ``back`` places before is; ``back`` counts from 1."""
        return slice(1 + self.slot * (back - 1), 1 + self.slot * back)


def plant(model: Qwen3ForCausalLM, seed: int = 0) -> None:
    """Overwrites the start weights of ``model`` in place; it needs two layers and tied embeddings.

    All other heads and every MLP begin with zero output, and may become what they will.
    """
    config = model.config
    layout = Layout.of(config)
    if config.num_hidden_layers < 2 or not config.tie_word_embeddings:
        raise ValueError("an induction circuit needs two layers and tied embeddings")
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = model.model.embed_tokens.weight
        embedding.normal_(0, _EMBEDDING_STD, generator=draw)
        embedding[:, 0] = _CONSTANT
        embedding[:, 1 : layout.token.start] = 0
        model.model.norm.weight.fill_(_FINAL)
        code = _rows(layout.slot, config.hidden_size - layout.token.start, draw)
        turn = float(config.rope_parameters["rope_theta"]) ** (
            -2 * torch.arange(config.head_dim // 2) / config.head_dim
        )
        _plant_before(model.model.layers[0].self_attn, code, layout, turn)
        _plant_match(model.model.layers[1].self_attn, code, layout, draw)


def _plant_before(attention: Qwen3Attention, code: Tensor, layout: Layout, turn: Tensor) -> None:
    """Head h looks h + 1 back: constant query and key whose product, turned by position, peaks there."""
    size = 2 * len(turn)
    fast = (turn > 0.03).float()  # radians per position
    attention.q_norm.weight.fill_(_NORM_BEFORE)
    attention.k_norm.weight.fill_(_NORM_BEFORE)
    for group in range(layout.slots // attention.num_key_value_groups):
        rows = slice(group * size, (group + 1) * size)
        attention.k_proj.weight[rows] = 0
        attention.v_proj.weight[rows] = 0
        attention.k_proj.weight[group * size : group * size + len(turn), 0] = _FIRM * fast
        attention.v_proj.weight[group * size : group * size + layout.slot, layout.token] = code
    for head in range(layout.slots):
        angle = (head + 1) * turn
        query = torch.cat([fast * angle.cos(), -fast * angle.sin()])
        attention.q_proj.weight[head * size : (head + 1) * size] = 0
        attention.q_proj.weight[head * size : (head + 1) * size, 0] = _FIRM * query
        store = attention.o_proj.weight[layout.place(head + 1), head * size : head * size + layout.slot]
        store.copy_(torch.eye(layout.slot) * _STORE)


def _plant_match(attention: Qwen3Attention, code: Tensor, layout: Layout, draw: torch.Generator) -> None:
    """As many heads as look back: the last codes against those stored, in pairs that hardly turn with position."""
    group, width = attention.num_key_value_groups, layout.width
    size = attention.head_dim
    half, slow = size // 2, size // 4
    place = torch.cat([torch.arange(half - slow, half), torch.arange(size - slow, size)])
    query, key = torch.zeros(2, layout.slots * layout.slot, width)
    for at in range(layout.slots):
        weight = 1 - _FADE * at
        rows = slice(at * layout.slot, (at + 1) * layout.slot)
        key[rows, layout.place(at + 1)] = torch.eye(layout.slot) * weight**0.5
        if at:
            query[rows, layout.place(at)] = torch.eye(layout.slot) * weight**0.5
        else:
            query[rows, layout.token] = code * weight**0.5
    attention.q_norm.weight.fill_(_NORM_MATCH)
    attention.k_norm.weight.fill_(_NORM_MATCH)
    for head in range(layout.slots):
        rows = slice(head * size, (head + 1) * size)
        if head % group == 0:
            shared = slice(head // group * size, (head // group + 1) * size)
            spread = torch.zeros(size, len(query))
            spread[place] = _FIRM * _columns(len(place), len(query), draw)
            copy = _rows(size, width - layout.token.start, draw)
            attention.k_proj.weight[shared] = spread @ key
            attention.v_proj.weight[shared] = 0
            attention.v_proj.weight[shared, layout.token] = copy
        attention.q_proj.weight[rows] = spread @ query
        attention.o_proj.weight[layout.token, rows] = copy.T * _COPY / group


def _rows(rows: int, columns: int, draw: torch.Generator) -> Tensor:
    """Orthonormal rows in a random direction."""
    square = torch.randn(columns, columns, generator=draw)
    orthonormal: Tensor = torch.linalg.qr(square).Q
    return orthonormal[:rows]


def _columns(rows: int, columns: int, draw: torch.Generator) -> Tensor:
    """Orthonormal rows or columns, whichever are fewer: inner products survive as well as the size allows."""
    return _rows(rows, columns, draw) if rows <= columns else _rows(columns, rows, draw).T
