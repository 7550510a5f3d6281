"""Tensors of GGUF files, memory-mapped, with Hugging Face's names and row order."""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from parlay.models.config import DecoderConfig
from parlay.models.families.family import Family, GgufForm
from parlay.models.gguf.config import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, RopeFactors
from parlay.models.gguf.packing_ahead import take
from parlay.models.gguf.reader import BadGguf, Header, TensorInfo
from parlay.models.weights.dequantize import dense
from parlay.models.weights.regrouped import in_halves, unfused
from parlay.models.weights.shapes import Weight, check_weights, unread, weight_shapes
from parlay.models.weights.stored import StoredTensor

LM_HEAD = "output.weight"
_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
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
    "post_attention_norm": "attention_out_layernorm",
    "post_ffw_norm": "mlp_out_layernorm",
    "attn_sinks": "self_attn.sinks",
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "per_layer_out_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "pre_ffw_norm_2": "experts_layernorm",
    "post_ffw_norm_1": "dense_out_layernorm",
    "post_ffw_norm_2": "experts_out_layernorm",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SCALES = {"ffn_gate_inp": "router_layernorm", "ffn_down_exps": "mlp.expert_scale"}
"""Tensors of a layer whose names end in ``scale``."""
_NAMES = {theirs: ours for ours, theirs in (_WHOLE | _OF_A_LAYER).items()}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)")
_RECOMPUTED = re.compile(r"rope_(freqs|factors_short|factors_long)\.weight|blk\.\d+\.attn_rot_embd\.weight")
"""Tensors of rotary positions, which the config already describes."""
_TIED = ("token_embd.weight", LM_HEAD)
_COMPARED, _SAME = 64, 0.9
_MOST_FACTORS = 1 << 14


def load(parts: Sequence[Header], family: Family, config: DecoderConfig) -> dict[str, Weight]:
    """All weights of the decoder by Hugging Face name: vectors as float32, matrices in the file's own blocks.

    Matrices are mapped, not read; query and key rows are permuted on reading if necessary. Raises BadGguf,
    BadCheckpoint or UnsupportedModel, in one line.
    """
    form = family.gguf
    assert form is not None, "families of files have one"
    ahead, weights = take(parts[0].path), dict[str, Weight]()
    for part in parts:
        for info, stored in mapped(part):
            if _RECOMPUTED.fullmatch(info.name):
                continue
            name = _name(info.name, form)
            if len(info.shape) > 1 and not name.endswith(".bias"):
                weights[name] = replace(stored, ahead=ahead)
                continue
            vector = _vector(stored)
            weights[name] = vector[None] if name.endswith("shared_expert_gate.weight") else vector
    weights = unfused(weights, config)
    if form.interleaved:
        weights = in_halves(weights, config)
    expected, spare = weight_shapes(config), unread(config)
    check_weights(parts[0].path, expected, {name: weight for name, weight in weights.items() if name not in spare})
    return {name: weights[name] for name in expected}


def rope_factors(parts: Sequence[Header], *, long: bool) -> RopeFactors:
    """The tensor of frequency divisors for short or ``long`` texts; empty if there is none."""
    for part in parts:
        for info in part.tensors:
            if info.name in (ROPE_FACTORS, LONG_FACTORS if long else SHORT_FACTORS):
                if math.prod(info.shape) > _MOST_FACTORS:
                    raise BadGguf(f"{info.name} has the shape {list(info.shape)}: expected a number for each pair")
                numbers = _vector(next(mapped(replace(part, tensors=(info,))))[1]).flatten()
                return RopeFactors(info.name, tuple(numbers.tolist()))
    return RopeFactors()


def embedding_twice(parts: Sequence[Header]) -> bool:
    """Whether the LM head is a copy of the embedding in another format, so that the model ties them.

    Some rows of both are compared: quantization leaves their cosine above 0.9, while that of untied matrices is near 0.
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
    embedding, head = (dense(found[name].chosen(ids)).flatten() for name in _TIED)
    return bool(torch.cosine_similarity(embedding, head, dim=0) > _SAME)


def mapped(part: Header) -> Iterator[tuple[TensorInfo, StoredTensor]]:
    """The mapped tensors of one file; pages that nobody reads take no memory, and writes stay in this process."""
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
    """Read a tensor that is not a matrix. Raises BadGguf if it is quantized, as dequantizing could take many times the
    file's size."""
    if stored.format.plain is None:
        raise BadGguf(f"{stored.origin} is not a matrix and stored as {stored.format.name}: expected plain numbers")
    with stored.reading():
        return dense(stored)


def gguf_name(name: str, form: GgufForm | None = None) -> str:
    """The GGUF name of the decoder's weight ``name`` in files of a family."""
    base, _, kind = name.rpartition(".")
    if base in _NAMES:
        return f"{_NAMES[base]}.{kind}"
    _, _, layer, rest = base.split(".", 3)
    own = {ours: theirs for theirs, ours in form.names.items()} if form is not None else {}
    return f"blk.{layer}.{own.get(rest) or _NAMES[rest]}.{kind}"


def _name(name: str, form: GgufForm) -> str:
    """The Hugging Face name of a tensor; one that the decoder lacks keeps its name, for the error."""
    base, _, kind = name.rpartition(".")
    if base in _WHOLE:
        return f"{_WHOLE[base]}.{kind}"
    match = _LAYER.fullmatch(base)
    if match and kind == "scale" and match[2] in _SCALES:
        return f"model.layers.{int(match[1])}.{_SCALES[match[2]]}.weight"
    ours = {**_OF_A_LAYER, **form.names}.get(match[2]) if match else None
    return name if match is None or ours is None else f"model.layers.{int(match[1])}.{ours}.{kind}"
