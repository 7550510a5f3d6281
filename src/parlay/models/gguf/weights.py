"""Tensors of GGUF files, mapped, under their Hugging Face names and with their rows in Hugging Face's order."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from parlay.models.config import DecoderConfig
from parlay.models.families.family import Family
from parlay.models.gguf.config import ROPE_FACTORS
from parlay.models.gguf.packing_ahead import take
from parlay.models.gguf.reader import BadGguf, Header, TensorInfo
from parlay.models.weights.dequantize import dense
from parlay.models.weights.shapes import Weight, check_weights, weight_shapes
from parlay.models.weights.stored import StoredTensor

LM_HEAD = "output.weight"
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {theirs: ours for ours, theirs in (_WHOLE | _OF_A_LAYER).items()}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)")
_RECOMPUTED = re.compile(rf"{re.escape(ROPE_FACTORS)}|blk\.\d+\.attn_rot_embd\.weight")
"""Tensors that say how positions turn: the config tells it, or did."""
_TIED = ("token_embd.weight", LM_HEAD)
_COMPARED, _SAME = 64, 0.9
TURNED = re.compile(r"self_attn\.[qk]_proj\.")
"""The decoder's names of weights whose rows turn with positions."""


def load(parts: Sequence[Header], family: Family, config: DecoderConfig) -> dict[str, Weight]:
    """Every weight of the decoder under its Hugging Face name: vectors as float32, matrices in the file's own blocks.

    Matrices are mapped, not read; rows of queries and keys that must change places do when they are read.
    Raises BadGguf, BadCheckpoint or UnsupportedModel, with the reason in one line.
    """
    interleaved = family.gguf is not None and family.gguf.interleaved
    ahead, weights = take(parts[0].path), dict[str, Weight]()
    for part in parts:
        for info, stored in mapped(part):
            if _RECOMPUTED.fullmatch(info.name):
                continue
            name = _name(info.name)
            weight = _vector(stored) if len(info.shape) == 1 else replace(stored, ahead=ahead)
            weights[name] = _halves(weight, config.head_dim) if interleaved and TURNED.search(name) else weight
    expected = weight_shapes(config)
    check_weights(parts[0].path, expected, weights)
    return {name: weights[name] for name in expected}


def rope_factors(parts: Sequence[Header]) -> tuple[float, ...]:
    """The numbers of the tensor that divides frequencies; empty where there is none."""
    for part in parts:
        for info in part.tensors:
            if info.name == ROPE_FACTORS:
                return tuple(_vector(next(mapped(replace(part, tensors=(info,))))[1]).flatten().tolist())
    return ()


def embedding_twice(parts: Sequence[Header]) -> bool:
    """Whether the LM head is the embedding once more, in a format of its own: the model ties the two.

    Some rows of both are compared. Rounding leaves their cosine above 0.9; that of untied matrices is near 0.
    """
    found = {
        info.name: stored
        for part in parts
        for info, stored in mapped(replace(part, tensors=tuple(each for each in part.tensors if each.name in _TIED)))
    }
    if len(found) < len(_TIED) or len({stored.shape for stored in found.values()}) > 1:
        return False
    count = next(iter(found.values())).shape[0]
    ids = torch.arange(0, count, max(1, count // _COMPARED))
    embedding, head = (_vector(found[name].chosen(ids)).flatten() for name in _TIED)
    return bool(torch.cosine_similarity(embedding, head, dim=0) > _SAME)


def mapped(part: Header) -> Iterator[tuple[TensorInfo, StoredTensor]]:
    """The tensors of one file. Pages that nobody reads take no memory, and what is written stays in this process."""
    with part.path.open("rb") as opened:
        file = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    content = torch.frombuffer(file, dtype=torch.uint8)
    for info in part.tensors:
        if info.offset + info.bytes > len(content):
            raise BadGguf("it was cut short while it was read")
        row = info.format.row_bytes(info.shape[-1])
        data = content[info.offset : info.offset + info.bytes].view(*info.shape[:-1], row)
        origin = f"the tensor {info.name!r} of {part.path}"
        yield info, StoredTensor(info.format, info.shape, data, file, origin)


def _vector(stored: StoredTensor) -> Tensor:
    with stored.reading():
        return dense(stored)


def gguf_name(name: str) -> str:
    """GGUF's name of a weight that the decoder calls ``name``."""
    base, _, kind = name.rpartition(".")
    if base in _NAMES:
        return f"{_NAMES[base]}.{kind}"
    _, _, layer, rest = base.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.{kind}"


def _name(name: str) -> str:
    """Under Hugging Face's name; one that a decoder has no weight for stays as it is, to be named in an error."""
    base, _, kind = name.rpartition(".")
    if base in _WHOLE:
        return f"{_WHOLE[base]}.{kind}"
    match = _LAYER.fullmatch(base)
    if match and match[2] in _OF_A_LAYER:
        return f"model.layers.{int(match[1])}.{_OF_A_LAYER[match[2]]}.{kind}"
    return name


def _halves(weight: Tensor | StoredTensor, head_dim: int) -> Tensor | StoredTensor:
    """Each head's rows from pairs that turn together (0, D/2, 1, D/2 + 1, ...) back to halves.

    ``weight`` ``[heads * D, ...]``; whole rows move. One of a wrong shape stays, for the check of shapes to name it.
    """
    count = weight.shape[0]
    if count % head_dim:
        return weight
    order = torch.arange(count).reshape(-1, head_dim // 2, 2).transpose(1, 2).reshape(count)
    return replace(weight, order=order) if isinstance(weight, StoredTensor) else weight[order]
