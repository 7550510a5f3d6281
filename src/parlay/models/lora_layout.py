"""PEFT's adapter format: turns a config's fields and a file's tensor names into matrices of the decoder."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parlay.models.config import DecoderConfig
from parlay.models.families.llama import LLAMA
from parlay.models.families.table import FAMILIES
from parlay.models.weights.regrouped import STACKED, in_halves, unfused
from parlay.models.weights.shapes import some, weight_shapes
from parlay.types import ParlayError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PRODUCTS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""A layer's products that adapters can change, in the compiled decoder's order."""
EXPERT_PRODUCTS = ("gate_proj", "up_proj", "down_proj")
"""An expert's products, in the same order."""
_PART_OF = {
    **{name: name for name in (product.rpartition(".")[2] for product in PRODUCTS)},
    "qkv_proj": "q_proj",
    "gate_up_proj": "gate_proj",
}
"""The decoder's product for each module name that PEFT lists."""
_OF_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<product>.+)\.weight")
_OF_EXPERT = re.compile(r"mlp\.(?:experts\.(?P<number>\d+)|shared_expert)\.(?P<product>\w+)")
MOST_RANK = 512
"""The compiled decoder's limit, as in its adapters.h."""
_KNOWN = frozenset(
    {
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config"),
        *("ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode"),
        *("init_lora_weights", "lora_alpha", "lora_bias", "lora_dropout", "loftq_config", "megatron_config"),
        *("layers_pattern", "layers_to_transform", "megatron_core", "modules_to_save", "peft_type", "peft_version"),
        *("qalora_group_size", "r"),
        *("rank_pattern", "revision", "runtime_config", "target_modules", "target_parameters", "task_type", "use_dora"),
        *("use_qalora", "use_rslora"),
    }
)
"""Fields that are honoured or only matter in training; of others only empty values are accepted."""
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_PREFIX = "base_model.model."
_PARTS = {".lora_A.weight": 0, ".lora_B.weight": 1}
_PLAIN = re.compile(r"\^?[\w.]+")
_WRAPPED = ("gate_up_proj", "down_proj", "weight")
"""Parameters of modules of experts, in the modules' order."""
_INPUTS_FIRST = ("GptOssForCausalLM",)
"""Architectures whose stacked experts are ``[E, I, O]`` in transformers."""
_OUTPUTS_FIRST = (0, 19)
"""The version from which on PEFT treats the inputs of ``[E, O, I]`` as inputs."""


class BadAdapter(ParlayError):
    """Raised for an adapter that can't be read or belongs to another model; the message is one line."""


class LowRank(NamedTuple):
    """Matrices that add ``up_OR (down_RI x)`` to a product of the model; the scale is included in ``up_OR``."""

    down_RI: Tensor
    up_OR: Tensor


class Place(NamedTuple):
    """A product of a layer or expert, and its ``number`` among the layer's or expert's products. The shared expert
    comes after all others."""

    layer: int
    product: str
    expert: int | None
    number: int


def place_of(name: str, config: DecoderConfig) -> Place | None:
    """The product to which the weight of this name belongs; None if adapters by row can't change it."""
    match = _OF_LAYER.fullmatch(name)
    if match is None or int(match["layer"]) >= config.num_layers:
        return None
    layer, product = int(match["layer"]), match["product"]
    if product in PRODUCTS:
        return Place(layer, product, None, PRODUCTS.index(product))
    expert, form = _OF_EXPERT.fullmatch(product), config.forms[layer].experts
    if expert is None or form is None or expert["product"] not in EXPERT_PRODUCTS:
        return None
    number = form.count if expert["number"] is None else int(expert["number"])
    return Place(layer, product, number, EXPERT_PRODUCTS.index(expert["product"]))


def refusal(declared: Mapping[str, Any]) -> str | None:
    """Why an adapter with this config can't be run; None if it can."""
    start, excluded = str(declared.get("init_lora_weights", "")), declared.get("exclude_modules")
    reasons = {
        f"peft_type {declared.get('peft_type')!r:.30} is not supported: LORA is": declared.get("peft_type") != "LORA",
        "use_dora is not supported: merge the adapter into its base with PEFT": bool(declared.get("use_dora")),
        f"modules_to_save {declared.get('modules_to_save')!r:.60} are whole weights, not supported: merge the adapter "
        "into its base with PEFT": bool(declared.get("modules_to_save")),
        "bias is not supported: train the adapter with bias 'none'": declared.get("bias", "none") != "none"
        or bool(declared.get("lora_bias")),
        "fan_in_fan_out is not supported": bool(declared.get("fan_in_fan_out")),
        "use_qalora is not supported: its inputs are averaged in groups": bool(declared.get("use_qalora")),
        f"init_lora_weights {start!r:.20} changed the base: convert the adapter with PEFT": start.startswith(
            ("pissa", "olora", "corda", "loftq")
        ),
        f"exclude_modules {excluded!r:.40} is an expression, which is not run: list names, or remove the key, for "
        "PEFT saves no matrices of what it excludes": isinstance(excluded, str) and bool(excluded),
    }
    reasons |= {f"{CONFIG} does not say r, the rank": "r" not in declared}
    reasons |= {f"{name!s:.60} is not supported": bool(value) for name, value in declared.items() if name not in _KNOWN}
    return next((reason for reason, applies in reasons.items() if applies), None)


def read_matrices(
    folder: Path,
    declared: Mapping[str, Any],
    config: DecoderConfig,
    tensors: Mapping[str, Tensor],
    *,
    merging: bool,
) -> dict[str, LowRank]:
    """Assign the tensors of an adapter's file to the weights that they add to; with ``merging`` any matrix may be
    changed.

    Raises BadAdapter for tensors that do not fit, and what reading an invalid config raises.
    """
    pairs, unknown = _pairs(tensors)
    parameters = _parameters(folder, declared, pairs)
    reader = _Reader(folder, declared, config, weight_shapes(config))
    stacked = {module: key for module, key in parameters.items() if reader.stacked(key) is not None}
    weights = {module: reader.weights_of(module, pair) for module, pair in pairs.items() if module not in stacked}
    able = {module: all(reader.can_change(name, merging=merging) for name in ups) for module, ups in weights.items()}
    unknown += [module for module, changed in able.items() if not changed]
    if unknown:
        raise BadAdapter(f"{folder}: the decoder has no linear layers {some(dict.fromkeys(unknown))} to adapt")
    if not pairs:
        raise BadAdapter(f"{folder}: {WEIGHTS} holds no matrices")
    _check_layers(folder, declared, pairs)
    _check_targets(folder, declared, pairs.keys() - parameters.keys(), reader.shapes)
    found: dict[str, LowRank] = {}
    for module, pair in pairs.items():
        if set(pair) != {0, 1}:
            raise BadAdapter(f"{folder}: {module} has lora_{'BA'[min(pair)]} missing")
        if module in stacked:
            found |= reader.of_experts(stacked[module], pair[0], pair[1])
        for name, up_OR in weights.get(module, {}).items():
            found[name] = reader.scaled(parameters.get(module, module), pair[0], up_OR, reader.shapes[name])
    return found


def _check_layers(folder: Path, declared: Mapping[str, Any], modules: Iterable[str]) -> None:
    """Raises BadAdapter for matrices of layers that the config excludes."""
    wanted = declared.get("layers_to_transform")
    if wanted is None:
        return
    chosen = {wanted} if isinstance(wanted, int) else {*wanted}
    layers = {int(match[1]) for module in modules if (match := _LAYER.search(module))}
    if left_out := sorted(layers - chosen):
        raise BadAdapter(
            f"{folder}: {CONFIG} adapts layers {sorted(chosen)!s:.40} alone (layers_to_transform), and {WEIGHTS} has "
            f"matrices of layer {left_out[0]}: one of the two files is another adapter's"
        )


def _pairs(tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[int, Tensor]], list[str]]:
    """Each module's matrices, A as number 0 and B as 1; and names that are neither."""
    pairs, unknown = dict[str, dict[int, Tensor]](), list[str]()
    for name, tensor in tensors.items():
        part = next((part for part in _PARTS if name.endswith(part)), "")
        if not part:
            unknown.append(name)
        pairs.setdefault(name.removesuffix(part).removeprefix(_PREFIX), {})[_PARTS.get(part, 0)] = tensor
    return pairs, unknown


class _Reader(NamedTuple):
    """Reads the matrices of one file according to its config and the decoder's."""

    folder: Path
    declared: Mapping[str, Any]
    config: DecoderConfig
    shapes: Mapping[str, tuple[int, ...]]

    def weights_of(self, module: str, pair: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """The B matrices by the decoder's names of the module's weights, several if the module is fused.

        Rows are in the decoder's order. If B is missing, A stands in for the names only.
        """
        family = FAMILIES.get(self.config.architecture, LLAMA)
        weights = unfused({family.renamed(f"{module}.weight"): pair.get(1, pair[min(pair)])}, self.config)
        if family.interleaved and 1 in pair:
            weights = in_halves(weights, self.config)
        return {name: weight for name, weight in weights.items() if isinstance(weight, Tensor)}

    def can_change(self, name: str, *, merging: bool) -> bool:
        """Whether the decoder has a matrix of this name that adapters can change."""
        able = merging or place_of(name, self.config) is not None
        return able and name.endswith(".weight") and len(self.shapes.get(name, ())) == 2

    def scaled(self, module: str, down_RI: Tensor, up_OR: Tensor, shape: tuple[int, ...]) -> LowRank:
        """The scaled matrices of one weight of this ``shape``, in float32. Raises BadAdapter if their shapes don't
        fit."""
        rank, scale = self._rank_and_scale(module)
        if len(down_RI) == up_OR.shape[-1] != rank:
            raise BadAdapter(
                f"{self.folder}: {CONFIG} says rank {rank}, and the matrices of {module} have {len(down_RI)}"
            )
        if (tuple(down_RI.shape), tuple(up_OR.shape)) != ((rank, shape[1]), (shape[0], rank)):
            raise self._of_another_base(module, (down_RI, up_OR), rank, ([rank, shape[1]], [shape[0], rank]))
        return self._finite(module, down_RI, up_OR, scale)

    def stacked(self, key: str) -> tuple[int, str] | None:
        """The layer and the part for a parameter of stacked experts; None for other parameters."""
        family = FAMILIES.get(self.config.architecture, LLAMA)
        match = STACKED.fullmatch(family.renamed(f"{key.removesuffix('.weight')}.weight"))
        layer = re.match(r"model\.layers\.(\d+)\.mlp\.", match["at"]) if match else None
        return (int(layer[1]), match["part"]) if match and layer else None

    def of_experts(self, key: str, down: Tensor, up: Tensor) -> dict[str, LowRank]:
        """The matrices of each expert from those of a stacked parameter: ``down`` ``[E * R, I]``, ``up`` ``[O, R *
        E]``.

        Raises BadAdapter for other shapes, and if it is unclear whether PEFT swapped inputs and outputs.
        """
        rank, scale = self._rank_and_scale(key)
        layer, part = self.stacked(key) or (0, "")
        form = self.config.forms[layer].experts if layer < self.config.num_layers else None
        if form is None:
            raise BadAdapter(f"{self.folder}: the decoder has no experts {key:.80} to adapt")
        inner, hidden = form.size, self.config.hidden_size
        sizes = (inner, hidden) if part == "down_proj" else (hidden, 2 * inner)
        expected = (form.count * rank, sizes[0]), (sizes[1], form.count * rank)
        swapped = (form.count * rank, sizes[1]), (sizes[0], form.count * rank)
        shapes = (tuple(down.shape), tuple(up.shape))
        if shapes not in (expected, swapped):
            raise self._of_another_base(key, (down, up), rank, ([*expected[0]], [*expected[1]]))
        down_ERI, up_EOR = down.view(form.count, rank, -1), up.view(-1, rank, form.count).permute(2, 0, 1)
        if self._is_swapped(key, shapes == expected, shapes == swapped):
            down_ERI, up_EOR = up_EOR.transpose(1, 2), down_ERI.transpose(1, 2)
        whole = self._finite(key, down_ERI, up_EOR, scale)
        found: dict[str, LowRank] = {}
        for name, up_OR in self._of_each(key, whole.up_OR).items():
            place = place_of(name, self.config)
            if place is not None and place.expert is not None:  # the others are of experts, too
                found[name] = LowRank(whole.down_RI[place.expert], up_OR)
        return found

    def _is_swapped(self, key: str, expected: bool, swapped: bool) -> bool:
        """Whether ``down`` belongs to the outputs, as in PEFT's first versions. Raises BadAdapter if that is
        unclear."""
        if not (expected and swapped) or self.config.architecture in _INPUTS_FIRST:
            return not expected
        version = re.match(r"(\d+)\.(\d+)\.", str(self.declared.get("peft_version", "")))
        if version is None:
            raise BadAdapter(
                f"{self.folder}: {key} has as many inputs as outputs, and no peft_version says which way round its "
                "matrices lie: save the adapter with a newer PEFT"
            )
        return (int(version[1]), int(version[2])) < _OUTPUTS_FIRST

    def _of_each(self, key: str, up_EOR: Tensor) -> dict[str, Tensor]:
        """Split ``up_EOR`` ``[E, O, R]`` by expert, under the decoder's weight names."""
        family = FAMILIES.get(self.config.architecture, LLAMA)
        if self.config.architecture in _INPUTS_FIRST:
            assert family.regroup is not None, "they have a way of their own"
            laid: Mapping[str, object] = family.regroup({key: up_EOR.transpose(1, 2)})
        else:
            laid = {f"{key.removesuffix('.weight')}.weight": up_EOR}
        renamed = {family.renamed(name): each for name, each in laid.items() if isinstance(each, Tensor)}
        return {name: each for name, each in unfused(renamed, self.config).items() if isinstance(each, Tensor)}

    def _rank_and_scale(self, module: str) -> tuple[int, float]:
        rank = self._of_pattern("rank_pattern", module, self.declared["r"])
        if not isinstance(rank, int):
            raise ValueError(f"rank {rank!r:.20} of {module} is not a whole number")
        if not 0 < rank <= MOST_RANK:
            raise BadAdapter(
                f"{self.folder}: rank {rank!s:.20} of {module} is not supported: at least 1 and at most {MOST_RANK}"
            )
        alpha = self._of_pattern("alpha_pattern", module, self.declared.get("lora_alpha", 8))
        return rank, alpha / (math.sqrt(rank) if self.declared.get("use_rslora") else rank)

    def _of_pattern(self, key: str, module: str, usual: object) -> int | float:
        """A module's number: that of the first pattern that its name ends in, or the usual one.

        Raises ValueError for a pattern that PEFT would not read as a number, either.
        """
        found = usual
        for pattern, number in (self.declared.get(key) or {}).items():
            if not _PLAIN.fullmatch(pattern):
                raise BadAdapter(
                    f"{self.folder}: {key} has the expression {pattern!r:.40}: only names of modules are supported"
                )
            whole = pattern.startswith("^")
            if module == pattern[1:] if whole else f".{module}".endswith(f".{pattern}"):
                found = number
                break
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise ValueError(f"{key.replace('_pattern', '')} {found!r:.20} of {module} is not a number")
        return found

    def _finite(self, module: str, down: Tensor, up: Tensor, scale: float) -> LowRank:
        """Scale ``down`` and ``up``, of any shape, in float32. Raises BadAdapter for integers and numbers that are not
        finite."""
        if not (down.is_floating_point() and up.is_floating_point()):
            raise BadAdapter(f"{self.folder}: {module} has numbers of {down.dtype} and {up.dtype}: expected fractions")
        down, up = down.float(), up.float()
        if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
            raise BadAdapter(f"{self.folder}: some numbers of {module} are not finite: download or copy it again")
        if not torch.isfinite(up * scale).all():
            raise BadAdapter(f"{self.folder}: lora_alpha of {module} is too large, or no number")
        return LowRank(down, up * scale)

    def _of_another_base(
        self, module: str, pair: tuple[Tensor, Tensor], rank: int, expected: tuple[list[int], list[int]]
    ) -> BadAdapter:
        down, up = (list(each.shape) for each in pair)
        return BadAdapter(
            f"{self.folder}: {module} has lora_A {down} and lora_B {up}, and rank {rank} of this model asks "
            f"for {expected[0]} and {expected[1]}: it is for another base "
            f"({self.declared.get('base_model_name_or_path')!s:.60})"
        )


def _parameters(folder: Path, declared: Mapping[str, Any], modules: Collection[str]) -> dict[str, str]:
    """The parameter that matrices belong to, by module, where PEFT has wrapped parameters.

    PEFT wraps a module's parameters in order, each around the previous, so the first is innermost.
    """
    targets = declared.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ValueError("target_parameters is not a list of names")
    nested: dict[str, list[str]] = {}
    for module in modules:
        nested.setdefault(module.replace(".base_layer", ""), []).append(module)
    found: dict[str, str] = {}
    for base, names in nested.items():
        keys = [f"{base}.{parameter}" for parameter in _WRAPPED]
        wrapped = [key for key in keys if f".{key}".endswith(tuple(f".{target}" for target in targets))]
        if len(wrapped) != len(names) and (wrapped or len(names) > 1):
            raise BadAdapter(
                f"{folder}: {WEIGHTS} has {len(names)} pairs of matrices of {base}, and target_parameters name "
                f"{len(wrapped)} of its parameters"
            )
        found |= dict(zip(sorted(names, key=len, reverse=True), wrapped, strict=False))
    named = tuple(f".{key}" for key in found.values())
    if absent := [target for target in targets if not any(key.endswith(f".{target}") for key in named)]:
        raise BadAdapter(f"{folder}: target_parameters name {some(absent)}, of which {WEIGHTS} has no matrices")
    return found


def _check_targets(
    folder: Path, declared: Mapping[str, Any], modules: Collection[str], weights: Collection[str]
) -> None:
    """Raises BadAdapter unless the names in the config are those of the matrices; regular expressions are not run.

    Stacked experts are not modules, so their names may be listed without effect, as in PEFT.
    """
    for excluded in declared.get("exclude_modules") or []:
        if stray := [module for module in modules if f".{module}".endswith(f".{excluded}")]:
            raise BadAdapter(f"{folder}: {WEIGHTS} has matrices of {some(stray)}, which exclude_modules name")
    targets = declared.get("target_modules")
    if not isinstance(targets, list):
        return
    named = tuple(f".{target}" for target in targets)
    if stray := [module for module in modules if not f".{module}".endswith(named)]:
        raise BadAdapter(f"{folder}: {WEIGHTS} has matrices of {some(stray)}, which target_modules don't name")
    apart = "".join(name for name in weights if ".experts." not in name)
    own = {name for name, part in _PART_OF.items() if f".{part}." in apart}
    if absent := [name for name in targets if name in own and not any(each.endswith(f".{name}") for each in modules)]:
        raise BadAdapter(f"{folder}: target_modules name {some(absent)}, of which {WEIGHTS} has no matrices")
