"""Adapters of low rank in PEFT's layout (Hu et al. 2021): read strictly, and merged into a model's weights if wished.

A product y = W x becomes W x + scale * B (A x), with A ``[R, I]`` and B ``[O, R]``. Files are safetensors alone: what
is pickled is never opened.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parlay.models.config import DecoderConfig, read_json
from parlay.models.families.llama import LLAMA
from parlay.models.families.table import FAMILIES
from parlay.models.weights.shapes import Weight, some, weight_shapes
from parlay.models.weights.stored import StoredTensor
from parlay.types import Adapter, CanvasSpec, ParlayError, Segment

PRODUCTS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""A layer's products that an adapter can change, in the order of the compiled decoder's layers."""
CONFIG, WEIGHTS, MASKS = "adapter_config.json", "adapter_model.safetensors", "mask_rows.json"
_MOST_RANK = 512
_LONGEST_BLOCK = 256
_PREFIX = "base_model.model."
_PARTS = {".lora_A.weight": 0, ".lora_B.weight": 1}
_PLAIN = re.compile(r"\^?[\w.]+")


class BadAdapter(ParlayError):
    """An adapter's files that can't be read, or that are for another model; the message is one line."""


class LowRank(NamedTuple):
    """Matrices that add ``up_OR (down_RI x)`` to a product of the model. The scale is in ``up_OR`` already."""

    down_RI: Tensor
    up_OR: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LowRankAdapter(Adapter):
    """``matrices`` by the decoder's name of the weight that they add to, float32. ``path`` is where they were read."""

    matrices: Mapping[str, LowRank]
    path: Path


def read_adapter(folder: Path, config: DecoderConfig, name: str) -> LowRankAdapter:
    """The adapter in ``folder`` for a decoder of this config. Raises BadAdapter for one that can't be honoured."""
    if not (folder / CONFIG).is_file():
        raise BadAdapter(f"no {CONFIG} in {folder}: name the folder of an adapter in PEFT's layout")
    if not (folder / WEIGHTS).is_file():
        pickled = " (adapter_model.bin is pickled, and never opened)" if (folder / "adapter_model.bin").exists() else ""
        raise BadAdapter(f"no {WEIGHTS} in {folder}{pickled}: save the adapter as safetensors")
    said = read_json(folder / CONFIG)
    if reason := _refusal(said):
        raise BadAdapter(f"{folder}: {reason}")
    try:
        matrices = _matrices(folder, said, config, _read(folder / WEIGHTS))
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        raise BadAdapter(f"{folder}: {CONFIG} is no description of an adapter: {error!s:.80}") from None
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    with (folder / WEIGHTS).open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    return LowRankAdapter(name=name, salt=f"lora {digest.hexdigest()}", matrices=matrices, path=folder)


def merged(weights: Mapping[str, Weight], adapter: LowRankAdapter) -> dict[str, Weight]:
    """The weights with the adapter's products added, each in float32 and rounded once to its own dtype.

    Raises BadAdapter for a matrix in blocks: rounded anew it would be another.
    """
    found = dict(weights)
    for name, (down_RI, up_OR) in adapter.matrices.items():
        weight = weights[name]
        if isinstance(weight, StoredTensor) and weight.format.plain is None:
            raise BadAdapter(
                f"{adapter.path}: {name} is stored as {weight.format.name}, which no product can be merged into: run "
                f"the adapter beside the model (--enable-lora --lora-modules NAME={adapter.path})"
            )
        if isinstance(weight, StoredTensor):
            weight = weight.rows.clone().view(weight.format.plain or torch.float32).view(weight.shape)
        found[name] = (weight.float() + up_OR @ down_RI).to(weight.dtype)
    return found


def mask_of(folder: Path, vocab_size: int) -> CanvasSpec:
    """Read which token mask rows read that run with an adapter. Raises BadAdapter where its folder does not say."""
    if not (folder / MASKS).is_file():
        raise BadAdapter(f"no {MASKS} in {folder}: name an adapter that parlay train set-block --lora made")
    said = read_json(folder / MASKS)
    mask_id, block = said.get("mask_token_id"), said.get("set_block_size")
    if not isinstance(mask_id, int) or not 0 <= mask_id < vocab_size:
        raise BadAdapter(f"{folder / MASKS}: mask_token_id {mask_id!r:.20} is not in the vocabulary of {vocab_size}")
    if not isinstance(block, int) or not 0 < block <= _LONGEST_BLOCK:
        raise BadAdapter(f"{folder / MASKS}: set_block_size {block!r:.20}: expected 1 to {_LONGEST_BLOCK}")
    return CanvasSpec(mask_id, block, shift=True)


def adapter_rows(segments: Sequence[Segment]) -> list[LowRankAdapter | None]:
    """The adapter of each row of a forward; empty where none has one."""
    found: list[LowRankAdapter | None] = []
    for segment in segments:
        masks = 0 if segment.mask_adapter is None else segment.together
        for adapter, count in ((segment.adapter, segment.rows - masks), (segment.mask_adapter, masks)):
            if adapter is not None and not isinstance(adapter, LowRankAdapter):
                raise ValueError(f"{adapter.name} is no adapter of low rank")
            found += [adapter] * count
    return found if any(found) else []


def _refusal(said: Mapping[str, Any]) -> str | None:
    """Why an adapter of this config can't be run, if it can't."""
    start = str(said.get("init_lora_weights", ""))
    reasons = {
        f"peft_type {said.get('peft_type')!r:.30} is not supported: LORA is": said.get("peft_type") != "LORA",
        "use_dora is not supported: merge the adapter into its base with PEFT": bool(said.get("use_dora")),
        f"modules_to_save {said.get('modules_to_save')!r:.60} are whole weights, not supported: merge the adapter into "
        "its base with PEFT": bool(said.get("modules_to_save")),
        "bias is not supported: train the adapter with bias 'none'": said.get("bias", "none") != "none"
        or bool(said.get("lora_bias")),
        "fan_in_fan_out is not supported": bool(said.get("fan_in_fan_out")),
        f"init_lora_weights {start!r:.20} changed the base: convert the adapter with PEFT": start.startswith(
            ("pissa", "olora", "corda")
        ),
    }
    others = (
        "layer_replication",
        "layers_to_transform",
        "layers_pattern",
        "trainable_token_indices",
        "target_parameters",
        "alora_invocation_tokens",
    )
    reasons |= {f"{name} is not supported": bool(said.get(name)) for name in others}
    return next((reason for reason, applies in reasons.items() if applies), None)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file is no mapping)
    except (SafetensorError, OSError) as error:
        raise BadAdapter(f"{path} is damaged or cut short ({error}): download or copy it again") from error


def _matrices(
    folder: Path, said: Mapping[str, Any], config: DecoderConfig, tensors: Mapping[str, Tensor]
) -> dict[str, LowRank]:
    shapes, family = weight_shapes(config), FAMILIES.get(config.architecture, LLAMA)
    pairs: dict[str, dict[int, Tensor]] = {}
    unknown = []
    for name, tensor in tensors.items():
        part = next((part for part in _PARTS if name.endswith(part)), "")
        module = name.removesuffix(part).removeprefix(_PREFIX)
        weight = family.renamed(f"{module}.weight")
        if not part or not module.endswith(PRODUCTS) or weight not in shapes:
            unknown.append(module if part else name)
        pairs.setdefault(weight, {})[_PARTS.get(part, 0)] = tensor
    if unknown:
        raise BadAdapter(f"{folder}: the decoder has no linear layers {some(dict.fromkeys(unknown))} to adapt")
    if not pairs:
        raise BadAdapter(f"{folder}: {WEIGHTS} holds no matrices")
    return {name: _scaled(folder, said, name, pair, shapes[name]) for name, pair in pairs.items()}


def _scaled(
    folder: Path, said: Mapping[str, Any], name: str, pair: Mapping[int, Tensor], shape: tuple[int, ...]
) -> LowRank:
    module = name.removesuffix(".weight")
    if set(pair) != {0, 1}:
        raise BadAdapter(f"{folder}: {module} has lora_{'BA'[min(pair)]} missing")
    down_RI, up_OR = pair[0].float(), pair[1].float()
    rank = _of_pattern(folder, said, "rank_pattern", module, int(said["r"]))
    if not 0 < rank <= _MOST_RANK:
        raise BadAdapter(f"{folder}: rank {rank:g} of {module} is not supported: at least 1 and at most {_MOST_RANK}")
    if len(down_RI) == up_OR.shape[-1] != rank:
        raise BadAdapter(f"{folder}: {CONFIG} says rank {rank:g}, and the matrices of {module} have {len(down_RI)}")
    if (tuple(down_RI.shape), tuple(up_OR.shape)) != ((rank, shape[1]), (shape[0], rank)):
        raise BadAdapter(
            f"{folder}: {module} has lora_A {list(pair[0].shape)} and lora_B {list(pair[1].shape)}, and rank {rank:g} "
            f"of this model asks for {[int(rank), shape[1]]} and {[shape[0], int(rank)]}: it is for another base "
            f"({said.get('base_model_name_or_path')!s:.60})"
        )
    if not (torch.isfinite(down_RI).all() and torch.isfinite(up_OR).all()):
        raise BadAdapter(f"{folder}: some numbers of {module} are not finite: download or copy it again")
    alpha = _of_pattern(folder, said, "alpha_pattern", module, float(said.get("lora_alpha", 8)))
    scaled_OR = up_OR * (alpha / (math.sqrt(rank) if said.get("use_rslora") else rank))
    if not torch.isfinite(scaled_OR).all():
        raise BadAdapter(f"{folder}: lora_alpha {alpha:g} of {module} is too large, or no number")
    return LowRank(down_RI, scaled_OR)


def _of_pattern(folder: Path, said: Mapping[str, Any], key: str, module: str, usual: float) -> float:
    """The number of a module: that of the first name in the pattern that the module ends in, or the usual one."""
    for pattern, number in (said.get(key) or {}).items():
        if not _PLAIN.fullmatch(pattern):
            raise BadAdapter(f"{folder}: {key} has the expression {pattern!r:.40}: only names of modules are supported")
        if f".{module}".endswith(f".{pattern.removeprefix('^')}"):
            return float(number)
    return usual
