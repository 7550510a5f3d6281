"""Splits weights that checkpoints store together: fused projections, stacked experts, gpt-oss's mixtures."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from parlay.models.config import DecoderConfig
from parlay.models.weights.formats import Format
from parlay.models.weights.shapes import BadCheckpoint, Weight
from parlay.models.weights.stored import StoredTensor

TURNED = re.compile(r"self_attn\.[qk]_proj\.")
"""The decoder's names of weights whose rows are rotated."""
_OUT = "mlp.experts.down_proj"
_JOINS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_OF_LAYER = re.compile(r"(?P<at>model\.layers\.\d+\.)(?P<module>.+)\.(?P<kind>\w+)")
_EXPERT = re.compile(r"(?P<at>.*\.mlp\.experts\.)\d+\.(?P<part>.+)")
STACKED = re.compile(r"(?P<at>.*\.mlp\.experts\.)(?P<part>gate_up_proj|gate_proj|up_proj|down_proj)\.(?P<kind>\w+)")
"""The decoder's names of tensors with all experts of a layer."""


def matrices_in(product: str) -> tuple[str, ...]:
    """The matrices that are fused in a product of the decoder or of an expert; the product's own name if it is not
    fused."""
    at, _, last = product.rpartition(".")
    parts = next((parts for joined, parts in _JOINS.items() if joined.endswith(f".{last}")), (last,))
    return tuple(f"{at}.{part.rpartition('.')[2]}" for part in parts)


def unfused(weights: Mapping[str, Weight], config: DecoderConfig) -> dict[str, Weight]:
    """The decoder's weights one by one, from stacked experts and fused projections."""
    found: dict[str, Weight] = {}
    experts = max((form.experts.count for form in config.forms if form.experts), default=0)
    for name, weight in weights.items():
        stacked = STACKED.fullmatch(name)
        if stacked and len(weight.shape) > 1 and weight.shape[0] <= experts:  # the check of shapes names others
            for expert in range(weight.shape[0]):
                own = f"{stacked['at']}{expert}.{stacked['part']}.{stacked['kind']}"
                found.update(_halves_of_rows(own, _item(weight, expert), config))
        else:
            found.update(_halves_of_rows(name, weight, config))
    return found


def in_halves(weights: Mapping[str, Weight], config: DecoderConfig) -> dict[str, Weight]:
    """Reorder each head's rows from neighbouring pairs (0, D/2, 1, D/2 + 1, ...) to halves.

    Whole rows move; in partly rotated heads only the rotated rows do. A weight of the wrong shape stays as it is, for
    the check of shapes to report it.
    """
    return _reordered(weights, config, _halves_of_pairs(config))


def in_pairs(weights: Mapping[str, Weight], config: DecoderConfig) -> dict[str, Weight]:
    """Reorder each head's rows from halves to neighbouring pairs: the inverse of `in_halves`."""
    return _reordered(weights, config, _halves_of_pairs(config).argsort())


def _halves_of_pairs(config: DecoderConfig) -> Tensor:
    """The place among pairs of each row of a head in halves."""
    rotated = config.rope.rotated or config.head_dim
    places = torch.arange(config.head_dim)
    places[:rotated] = places[:rotated].view(-1, 2).T.flatten()
    return places


def _reordered(weights: Mapping[str, Weight], config: DecoderConfig, places_D: Tensor) -> dict[str, Weight]:
    found = dict(weights)
    for name, weight in weights.items():
        if TURNED.search(name) and len(weight.shape) and weight.shape[0] % config.head_dim == 0:
            order = torch.arange(weight.shape[0]).view(-1, config.head_dim)[:, places_D].flatten()
            found[name] = replace(weight, order=order) if isinstance(weight, StoredTensor) else weight[order]
    return found


def _halves_of_rows(name: str, weight: Weight, config: DecoderConfig) -> Iterator[tuple[str, Weight]]:
    """Split a fused matrix into gate and up, or queries, keys and values; other weights stay as they are."""
    base, _, kind = name.rpartition(".")
    if len(weight.shape) < (2 if isinstance(weight, StoredTensor) else 1):  # the check of shapes reports it
        yield name, weight
        return
    if base.endswith(".gate_up_proj"):
        half = weight.shape[0] // 2
        parts = {"gate_proj": slice(0, half), "up_proj": slice(half, None)}
    elif base.endswith(".qkv_proj"):
        query = config.num_heads * config.head_dim
        key = query + config.num_kv_heads * config.head_dim
        parts = {"q_proj": slice(0, query), "k_proj": slice(query, key), "v_proj": slice(key, None)}
    else:
        yield name, weight
        return
    at = base.rpartition(".")[0]
    for part, rows in parts.items():
        yield f"{at}.{part}.{kind}", weight.taken(rows) if isinstance(weight, StoredTensor) else weight[rows]


def fused(weights: Mapping[str, Tensor], forms: Collection[str]) -> dict[str, Tensor]:
    """Fuse what `unfused` splits: experts, and the projections named in ``forms``."""
    joins = {name: parts for name, parts in _JOINS.items() if name in forms}
    members = {part: name for name, parts in joins.items() for part in parts}
    groups: dict[str, list[Tensor]] = {}
    for name, weight in weights.items():
        expert = _EXPERT.fullmatch(name)
        at, part, kind = _split(name)
        if expert:
            groups.setdefault(f"{expert['at']}{expert['part']}", []).append(weight[None])
        elif part in members:
            groups.setdefault(f"{at}{members[part]}.{kind}", []).append(weight)
        else:
            groups[name] = [weight[0] if name.endswith("shared_expert_gate.weight") else weight]
    return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in groups.items()}


def _split(name: str) -> tuple[str, str, str]:
    """A weight name's layer, module and kind."""
    match = _OF_LAYER.fullmatch(name)
    return (match["at"], match["module"], match["kind"]) if match else ("", name, "")


def _item(weight: Weight, index: int) -> Weight:
    return weight.item(index) if isinstance(weight, StoredTensor) else weight[index]


def gpt_oss(tensors: Mapping[str, Tensor]) -> Mapping[str, Weight]:
    """Split gpt-oss's tensors, in which gates and ups alternate as columns, or as rows in MXFP4 blocks.

    Raises BadCheckpoint for blocks without exponents.
    """
    found: dict[str, Weight] = {}
    for name, tensor in tensors.items():
        base, _, kind = name.rpartition("_")
        if not name.rpartition(".")[0].endswith("mlp.experts"):
            found[name] = tensor
        elif kind == "blocks":
            found.update(_parts(base, mxfp4(name, tensor, _scales_of(base, tensors)), "weight"))
        elif kind == "bias":
            found.update(_parts(base, tensor, "bias"))
        elif kind != "scales":
            found.update(_parts(name, tensor.transpose(1, 2), "weight"))
    return found


def _parts(name: str, weight: Tensor | StoredTensor, kind: str) -> Iterator[tuple[str, Weight]]:
    """Keep the down projection as it is, and split gates from ups; ``weight`` is ``[E, O, ...]``."""
    if name.endswith(_OUT):
        yield f"{name}.{kind}", weight
        return
    for part, first in (("gate_proj", 0), ("up_proj", 1)):
        chosen = slice(first, None, 2)
        if isinstance(weight, StoredTensor):
            data = weight.data[:, chosen]
            rows: Weight = StoredTensor(weight.format, (*data.shape[:2], weight.shape[2]), data)
        else:
            rows = weight[:, chosen]
        yield f"{name.removesuffix('gate_up_proj')}{part}.{kind}", rows


def mxfp4(name: str, packed: Tensor, exponents: Tensor) -> StoredTensor:
    """Convert MXFP4 blocks, 32 four-bit codes with a power of two, to the layout of GGUF files.

    ``packed`` ``[..., K, 16]`` and ``exponents`` ``[..., K]`` are uint8. Only the order changes: a byte has two
    neighbouring codes here, and codes 16 apart in GGUF.
    """
    if tuple(packed.shape) != (*exponents.shape, 16) or {packed.dtype, exponents.dtype} != {torch.uint8}:
        raise BadCheckpoint(f"{name} {list(packed.shape)} has no scales of its shape, but {list(exponents.shape)}")
    if (exponents == 255).any():
        raise BadCheckpoint(f"{name}: some scales are no numbers: download or copy it again")
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    low, high = codes.chunk(2, -1)
    data = torch.cat((exponents[..., None], low | high << 4), -1).flatten(-2)
    return StoredTensor(Format.MXFP4, (*exponents.shape[:-1], 32 * exponents.shape[-1]), data)


def _scales_of(base: str, tensors: Mapping[str, Tensor]) -> Tensor:
    if f"{base}_scales" not in tensors:
        raise BadCheckpoint(f"{base}_blocks has no scales of its shape")
    return tensors[f"{base}_scales"]
