"""A start from which a model copies: an induction circuit planted into the random weights of its first two layers.

Copying stands on induction heads (Olsson et al. 2022, arXiv:2209.11895), and a run of a few million tokens ends before
they form by themselves. So they are written down: a head of layer 0 attends to the token before and stores its code
beside the token; heads of layer 1 look for places whose stored code is that of the present token, and copy the token
they find there, which is what came next last time. Training goes on from there like from any other start.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

_CONSTANT = 1.0  # residual dimension 0 holds this for every token: what position-only queries are made of
_EMBEDDING_STD = 0.5  # large, or what the layers learn to write soon drowns the token itself
_NORM_BEFORE, _NORM_MATCH = 2.5, 2.0  # query and key norm weights: how sharp the heads of layers 0 and 1 are
_STORE, _COPY, _FINAL = 1.0, 1.9, 0.16


def plant(model: Qwen3ForCausalLM, seed: int = 0) -> None:
    """Overwrites the start weights of ``model`` in place; it needs two layers and tied embeddings.

    Residual dimensions: 0 a constant, 1 to D the code of the token before, the rest the token itself (D: head size).
    All other heads and every MLP begin with zero output.
    """
    config = model.config
    size, width = config.head_dim, config.hidden_size
    if config.num_hidden_layers < 2 or not config.tie_word_embeddings or width < 2 * size:
        raise ValueError("an induction circuit needs two layers, tied embeddings and a hidden size of two heads")
    draw = torch.Generator().manual_seed(seed)
    token = slice(size + 1, width)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = model.model.embed_tokens.weight
        embedding.normal_(0, _EMBEDDING_STD, generator=draw)
        embedding[:, 0] = _CONSTANT
        embedding[:, 1 : size + 1] = 0
        model.model.norm.weight.fill_(_FINAL)
        code = _rows(size, width - size - 1, draw)
        _plant_before(model.model.layers[0].self_attn, code, token, config.rope_parameters["rope_theta"])
        _plant_match(model.model.layers[1].self_attn, code, token, draw)


def _plant_before(attention: nn.Module, code: Tensor, token: slice, theta: float) -> None:
    """Key head 0 and its queries: constant vectors whose product, turned by position, peaks one token back."""
    size, group = len(code), attention.num_key_value_groups
    half = size // 2
    turn = theta ** (-torch.arange(half) / half)  # radians per position of each pair (i, i + half)
    fast = (turn > 0.03).float()
    query, key = torch.zeros(2, size)
    query[:half] = fast
    key[:half], key[half:] = fast * turn.cos(), fast * turn.sin()
    attention.q_norm.weight.fill_(_NORM_BEFORE)
    attention.k_norm.weight.fill_(_NORM_BEFORE)
    for head in range(group):
        _write(attention.q_proj.weight[head * size : (head + 1) * size], query[:, None], slice(0, 1))
        store = attention.o_proj.weight[1 : size + 1, head * size : (head + 1) * size]
        store.copy_(torch.eye(size) * _STORE / group)
    _write(attention.k_proj.weight[:size], key[:, None], slice(0, 1))
    _write(attention.v_proj.weight[:size], code, token)


def _plant_match(attention: nn.Module, code: Tensor, token: slice, draw: torch.Generator) -> None:
    """Key head 0 and its queries: present code against stored code, in pairs that hardly turn with position."""
    size, group = len(code), attention.num_key_value_groups
    half, slow = size // 2, size // 4
    short = _rows(2 * slow, size, draw)
    place = torch.cat([torch.arange(half - slow, half), torch.arange(size - slow, size)])
    spread = torch.zeros(size, size)
    spread[place] = short
    copy = _rows(size, code.shape[1], draw)
    attention.q_norm.weight.fill_(_NORM_MATCH)
    attention.k_norm.weight.fill_(_NORM_MATCH)
    for head in range(group):
        _write(attention.q_proj.weight[head * size : (head + 1) * size], spread @ code, token)
        attention.o_proj.weight[token, head * size : (head + 1) * size] = copy.T * _COPY
    _write(attention.k_proj.weight[:size], spread, slice(1, size + 1))
    _write(attention.v_proj.weight[:size], copy, token)


def _write(weight: Tensor, block: Tensor, columns: slice) -> None:
    weight.zero_()
    weight[:, columns] = block


def _rows(rows: int, columns: int, draw: torch.Generator) -> Tensor:
    """Orthonormal rows in a random direction."""
    square = torch.randn(columns, columns, generator=draw)
    return torch.linalg.qr(square).Q[:rows]
