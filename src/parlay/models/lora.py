"""Adapters of low rank in PEFT's layout (Hu et al. 2021): read strictly, and merged into a model's weights if wished.

A product y = W x becomes W x + scale * B (A x), with A ``[R, I]`` and B ``[O, R]``. Files are safetensors alone: what
is pickled is never opened.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parlay.models.config import DecoderConfig, RopeConfig, read_json
from parlay.models.families.llama import LLAMA
from parlay.models.families.table import FAMILIES
from parlay.models.rope import row_order
from parlay.models.weights.regrouped import in_halves, unfused
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
TURNED = PRODUCTS[:2]
"""Those whose rows turn with positions."""
CONFIG, WEIGHTS, MASKS = "adapter_config.json", "adapter_model.safetensors", "mask_rows.json"
_MOST_RANK = 512
_LONGEST_BLOCK = 256
_KNOWN = frozenset(
    {
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config"),
        *("ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode"),
        *("init_lora_weights", "lora_alpha", "lora_bias", "lora_dropout", "loftq_config", "megatron_config"),
        *("megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r"),
        *("rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_dora", "use_qalora"),
        "use_rslora",
    }
)
"""Keys that are honoured, or bear on training alone. Of others only those that say nothing are accepted."""
_PREFIX = "base_model.model."
_PARTS = {".lora_A.weight": 0, ".lora_B.weight": 1}
_PLAIN = re.compile(r"\^?[\w.]+")


class BadAdapter(ParlayError):
    """An adapter's files that can't be read, or that are for another model; the message is one line."""


class LowRank(NamedTuple):
    """Matrices that add ``up_OR (down_RI x)`` to a product of the model. The scale is in ``up_OR`` already."""

    down_RI: Tensor
    up_OR: Tensor


def in_order(up_OR: Tensor, product: str, rope: RopeConfig | None, head_dim: int) -> Tensor:
    """The rows of a product's outputs in the order in which the decoder turns those of queries and keys."""
    order = row_order(rope, head_dim) if product in TURNED else None
    return up_OR if order is None else up_OR.view(-1, head_dim, up_OR.shape[1])[:, order].flatten(0, 1)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LowRankAdapter(Adapter):
    """``matrices`` by the decoder's name of the weight that they add to, float32. ``path`` is where they were read."""

    matrices: Mapping[str, LowRank]
    path: Path


def read_adapter(folder: Path, config: DecoderConfig, name: str, *, merging: bool = False) -> LowRankAdapter:
    """The adapter in ``folder`` for a decoder of this config; ``merging``: it may change experts, too.

    Raises BadAdapter for one that can't be honoured.
    """
    if not (folder / CONFIG).is_file():
        raise BadAdapter(f"no {CONFIG} in {folder}: name the folder of an adapter in PEFT's layout")
    if not (folder / WEIGHTS).is_file():
        pickled = " (adapter_model.bin is pickled, and never opened)" if (folder / "adapter_model.bin").exists() else ""
        raise BadAdapter(f"no {WEIGHTS} in {folder}{pickled}: save the adapter as safetensors")
    said = read_json(folder / CONFIG)
    if reason := _refusal(said):
        raise BadAdapter(f"{folder}: {reason}")
    try:
        matrices = _matrices(folder, said, config, _read(folder / WEIGHTS), merging=merging)
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, OverflowError) as error:
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


def refuse_masks(folder: Path) -> None:
    """Raises BadAdapter for an adapter that only mask rows are meant to run with: a text would be another one."""
    if (folder / MASKS).is_file():
        raise BadAdapter(f"{folder} is for rows of masks: name it by --strategy set-block:adapter={folder}")


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
        "use_qalora is not supported: its inputs are averaged in groups": bool(said.get("use_qalora")),
        f"init_lora_weights {start!r:.20} changed the base: convert the adapter with PEFT": start.startswith(
            ("pissa", "olora", "corda", "loftq")
        ),
    }
    reasons |= {f"{name!s:.60} is not supported": bool(value) for name, value in said.items() if name not in _KNOWN}
    return next((reason for reason, applies in reasons.items() if applies), None)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file is no mapping)
    except (SafetensorError, OSError) as error:
        raise BadAdapter(f"{path} is damaged or cut short ({error}): download or copy it again") from error


def _matrices(
    folder: Path, said: Mapping[str, Any], config: DecoderConfig, tensors: Mapping[str, Tensor], *, merging: bool
) -> dict[str, LowRank]:
    shapes, pairs, unknown = weight_shapes(config), dict[str, dict[int, Tensor]](), list[str]()
    for name, tensor in tensors.items():
        part = next((part for part in _PARTS if name.endswith(part)), "")
        module = name.removesuffix(part).removeprefix(_PREFIX)
        if not part:
            unknown.append(name)
        pairs.setdefault(module, {})[_PARTS.get(part, 0)] = tensor
    weights = {module: _weights_of(module, pair, config) for module, pair in pairs.items()}
    able = (".weight",) if merging else tuple(f"{product}.weight" for product in PRODUCTS)
    for module, ups in weights.items():
        if not all(name in shapes and len(shapes[name]) == 2 and name.endswith(able) for name in ups):
            unknown.append(module)
    if unknown:
        raise BadAdapter(f"{folder}: the decoder has no linear layers {some(dict.fromkeys(unknown))} to adapt")
    if not pairs:
        raise BadAdapter(f"{folder}: {WEIGHTS} holds no matrices")
    _check_targets(folder, said.get("target_modules"), pairs)
    return {
        name: _scaled(folder, said, module, {place: up if place else pair[0] for place in pair}, shapes[name])
        for module, pair in pairs.items()
        for name, up in weights[module].items()
    }


def _weights_of(module: str, pair: Mapping[int, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Lay out what leads out, by the decoder's names of the weights that the module holds: several where it is fused.

    Rows lie as the decoder has those of the weights. Where what leads out is missing, there is nothing to be laid out.
    """
    family = FAMILIES.get(config.architecture, LLAMA)
    weights = unfused({family.renamed(f"{module}.weight"): pair.get(1, pair[min(pair)])}, config)
    if family.interleaved and 1 in pair:
        weights = in_halves(weights, config)
    return {name: weight for name, weight in weights.items() if isinstance(weight, Tensor)}


def _check_targets(folder: Path, targets: object, modules: Collection[str]) -> None:
    """Raises BadAdapter unless the names that the config lists are those of the matrices; expressions are not run."""
    if not isinstance(targets, list):
        return
    named = tuple(f".{target}" for target in targets)
    if stray := [module for module in modules if not f".{module}".endswith(named)]:
        raise BadAdapter(f"{folder}: {WEIGHTS} has matrices of {some(stray)}, which target_modules don't name")
    own = {product.rpartition(".")[2] for product in PRODUCTS} | {"qkv_proj", "gate_up_proj"}
    if absent := [name for name in targets if name in own and not any(each.endswith(f".{name}") for each in modules)]:
        raise BadAdapter(f"{folder}: target_modules name {some(absent)}, of which {WEIGHTS} has no matrices")


def _scaled(
    folder: Path, said: Mapping[str, Any], module: str, pair: Mapping[int, Tensor], shape: tuple[int, ...]
) -> LowRank:
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
