"""Reads the quantization section of config.json, and converts quantized tensors to weights for decoders."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from parlay.models.config import Json, UnsupportedModel, read_json
from parlay.models.quantized import layouts
from parlay.models.quantized.affine import Affine
from parlay.models.quantized.layouts import Grouping, Parts
from parlay.models.quantized.tables import NF4_STATE, float8, nf4
from parlay.models.weights.regrouped import mxfp4
from parlay.models.weights.shapes import BadCheckpoint, Weight
from parlay.types import ParlayError

_log = logging.getLogger(__name__)
METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "bitsandbytes", "mlx")
"""Names in ``quant_method``; MLX has no such key."""
_PACKED_MXFP4, _FLOATS, _FP8 = "mxfp4-pack-quantized", "float-quantized", "fp8"
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_OF_FLOAT8 = ("weight_scale_inv", "weight_scale", "input_scale", "activation_scale")
"""Further tensors of an eight-bit float matrix; the last two are for quantizing inputs, which is not done here."""
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint's matrices are quantized. ``own`` has the groupings of single matrices that differ.

    ``block`` is the number of outputs and of inputs that share a scale, for eight-bit floats in blocks.
    """

    method: str
    grouping: Grouping
    own: Mapping[str, Grouping]
    block: tuple[int, int] = (1, 1)


def scheme_of(directory: Path, raw: Json, of_family: Collection[str] = ()) -> Scheme | None:
    """The scheme in a config.json; None for plain weights, and for methods that the family reads itself.

    Raises UnsupportedModel for an unsupported method, ParlayError for an unsupported variant of a known one.
    """
    declared = raw.get("quantization_config") or raw.get("compression_config") or raw.get("quantization")
    if declared is None and (directory / "quantize_config.json").is_file():  # as early versions of AutoGPTQ wrote it
        declared = {"quant_method": "gptq", **read_json(directory / "quantize_config.json")}
    if declared is None:
        return None
    if not isinstance(declared, Mapping):
        raise ParlayError(f"{directory}: config.json's quantization_config is not an object")
    method = str(declared.get("quant_method") or ("mlx" if "group_size" in declared else "none"))
    if method in of_family:
        return None
    if method not in METHODS:
        raise UnsupportedModel(f"quant_method {method!r:.40} can't be read: {', '.join(METHODS)} can")
    try:
        reason = _REFUSED[method](declared)
        grouping, own = _grouping(method, declared), _own(declared) if method == "mlx" else {}
        block = _block(declared)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ParlayError(f"{directory}: config.json's quantization_config can't be read: {error!r:.80}") from None
    if reason:
        raise ParlayError(f"{directory}: {method} {reason}")
    named = {_PACKED_MXFP4: _PACKED_MXFP4, _FLOATS: _FP8}.get(str(declared.get("format")), method)
    return Scheme(named, grouping, own, block)


def _grouping(method: str, declared: Json) -> Grouping:
    size = int(declared.get("group_size", 128 if method in ("awq", "gptq") else -1) or -1)
    if size != -1 and size < 1:
        raise ValueError(f"group_size {size}")
    version_1 = method == "gptq" and declared.get("checkpoint_format", "gptq") != "gptq_v2"
    return Grouping(size, zero_offset=int(version_1))


def _block(declared: Json) -> tuple[int, int]:
    """The block size of eight-bit floats, which each maker names differently."""
    groups = [group.get("weights") or {} for group in (declared.get("config_groups") or {}).values()]
    found = [declared.get("weight_block_size"), *(weights.get("block_structure") for weights in groups)]
    outputs, inputs = next((each for each in found if each), (1, 1))
    if min(int(outputs), int(inputs)) < 1:
        raise ValueError(f"blocks of {outputs} outputs and {inputs} inputs")
    return int(outputs), int(inputs)


def _own(declared: Json) -> dict[str, Grouping]:
    """Groupings of single matrices, which MLX lists by name."""
    return {name: Grouping(int(form["group_size"])) for name, form in declared.items() if isinstance(form, Mapping)}


def _awq_reason(declared: Json) -> str | None:
    if str(declared.get("version", "gemm")).lower() != "gemm":
        return f"layout {declared['version']!r:.20} can't be read: convert it to gemm"
    return None if int(declared.get("bits", 4)) == 4 else f"with {declared['bits']} bits can't be read: only 4 bits can"


def _gptq_reason(declared: Json) -> str | None:
    form, bits = str(declared.get("checkpoint_format", "gptq")), int(declared.get("bits", 4))
    if form not in ("gptq", "gptq_v2"):
        return f"checkpoint_format {form!r:.20} can't be read: gptq and gptq_v2 can"
    return None if bits in (2, 4, 8) else f"with {bits} bits can't be read: 2, 4 and 8 bits can"


def _compressed_reason(declared: Json) -> str | None:
    groups = list((declared.get("config_groups") or {}).values())
    forms = {str(declared.get("format")), *(str(group["format"]) for group in groups if group.get("format"))}
    if declared.get("sparsity_config") and declared["sparsity_config"].get("format", "dense") != "dense":
        return f"sparsity {declared['sparsity_config']['format']!r:.30} can't be read: only dense matrices can"
    if declared.get("transform_config"):
        return "with a transform_config can't be read: matrices that turn inputs before a product are not supported"
    if forms not in ({"pack-quantized"}, {_PACKED_MXFP4}, {_FLOATS}):
        return (
            f"format {', '.join(sorted(forms)):.60} can't be read: pack-quantized (W4A16, W8A16), float-quantized "
            "(FP8) and mxfp4 can"
        )
    if forms != {_FLOATS} and any(group.get("input_activations") for group in groups):
        return "with rounded activations can't be read: only weights may be rounded"
    return None


def _fp8_reason(declared: Json) -> str | None:
    form = declared.get("fmt", "e4m3")
    return None if form in ("e4m3", "e5m2") else f"of the form {form!r:.20} can't be read: e4m3 and e5m2 can"


def _bitsandbytes_reason(declared: Json) -> str | None:
    if declared.get("load_in_8bit") or declared.get("_load_in_8bit"):
        return "in 8 bits (LLM.int8) can't be read: nf4 can"
    kind = declared.get("bnb_4bit_quant_type", "fp4")
    return None if kind == "nf4" else f"{kind!r:.20} can't be read: nf4 can"


def _mlx_reason(declared: Json) -> str | None:
    mode = declared.get("mode", "affine")
    return None if mode == "affine" else f"mode {mode!r:.20} can't be read: affine can"


_REFUSED: Mapping[str, Callable[[Json], str | None]] = {
    "awq": _awq_reason,
    "gptq": _gptq_reason,
    "compressed-tensors": _compressed_reason,
    "fp8": _fp8_reason,
    "bitsandbytes": _bitsandbytes_reason,
    "mlx": _mlx_reason,
}
"""Why a variant of a method can't be read; None if it can."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """The tensor that marks a quantized matrix, its other tensors, and how they are read."""

    mark: str
    others: tuple[str, ...]
    read: Callable[[str, Parts, Grouping], Affine]


_LAYOUTS = {
    "awq": _Layout("qweight", ("qzeros", "scales"), layouts.awq),
    "gptq": _Layout("qweight", ("qzeros", "scales", "g_idx"), layouts.gptq),
    "compressed-tensors": _Layout(
        "weight_packed",
        ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        layouts.compressed_tensors,
    ),
    "mlx": _Layout("scales", ("weight", "biases"), layouts.mlx),
}


def restored(scheme: Scheme, tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Weight]:
    """The checkpoint's weights under plain names: quantized matrices in blocks, or as numbers if no block format holds
    them.

    The numbers are in ``dtype``, the checkpoint's own. Raises BadCheckpoint for missing or mis-shaped tensors.
    """
    if scheme.method == "bitsandbytes":
        return _restored_nf4(tensors)
    if scheme.method == _PACKED_MXFP4:
        return _restored_mxfp4(tensors)
    if scheme.method == _FP8:
        return _restored_float8(tensors, scheme.block, _DTYPES.get(dtype, torch.float32))
    layout, weights, reasons = _LAYOUTS[scheme.method], dict[str, Weight](), Counter[str]()
    rounded = {name.removesuffix(f".{layout.mark}") for name in tensors if name.endswith(f".{layout.mark}")}
    kinds = (layout.mark, *layout.others)
    taken = {f"{name}.{kind}" for name in rounded for kind in kinds}
    weights.update({name: tensor for name, tensor in tensors.items() if name not in taken})
    for name in sorted(rounded):
        parts = {kind: tensors[f"{name}.{kind}"] for kind in kinds if f"{name}.{kind}" in tensors}
        with fitting(name):
            matrix = layout.read(name, parts, scheme.own.get(name, scheme.grouping))
            matrix.check_scales(name)
            reason, number = matrix.obstacle(), _DTYPES.get(dtype, torch.float32)
            weights[f"{name}.weight"] = _finite(name, matrix.dense(number)) if reason else matrix.in_blocks()
        reasons.update([reason] if reason else [])
    for reason, count in reasons.items():
        _log.warning("%d of %d matrices are multiplied in %s, for %s", count, len(rounded), dtype, reason)
    return weights


def _finite(name: str, numbers_OI: Tensor) -> Tensor:
    """Return the numbers ``[O, I]``. Raises BadCheckpoint if some overflowed their type."""
    if not numbers_OI.isfinite().all():
        raise BadCheckpoint(f"{name}: some of its numbers are beyond {numbers_OI.dtype}: download or copy it again")
    return numbers_OI


@contextmanager
def fitting(name: str) -> Iterator[None]:
    """Raises BadCheckpoint if tensors of the matrix ``name`` have other types or shapes than the layout."""
    try:
        yield
    except ParlayError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError) as error:
        raise BadCheckpoint(f"{name}: its parts don't fit each other: {' '.join(str(error).split()):.100}") from None


def _restored_nf4(tensors: Mapping[str, Tensor]) -> dict[str, Weight]:
    rounded = {name.removesuffix(f".{NF4_STATE}") for name in tensors if name.endswith(f".{NF4_STATE}")}
    weights: dict[str, Weight] = {}
    for name, parts in _by_matrix(rounded, tensors):
        with fitting(name):
            weights[name] = nf4(name, parts) if name in rounded else parts[""]
    if rounded:
        _log.warning("%d matrices in nf4 are multiplied in floating point, which takes longer", len(rounded))
    return weights


def _by_matrix(rounded: set[str], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Each quantized matrix with its tensors, and every other tensor alone."""
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in rounded}
    for name, tensor in tensors.items():
        of, _, kind = name.partition(".weight.")
        of = f"{of}.weight" if kind else name
        if of in parts:
            parts[of][kind] = tensor
        else:
            parts[name] = {"": tensor}
    yield from parts.items()


def _restored_float8(tensors: Mapping[str, Tensor], block: tuple[int, int], dtype: torch.dtype) -> dict[str, Weight]:
    rounded = {name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.dtype in _FLOAT8}
    kinds = ("weight", *_OF_FLOAT8)
    taken = {f"{name}.{kind}" for name in rounded for kind in kinds}
    weights: dict[str, Weight] = {name: tensor for name, tensor in tensors.items() if name not in taken}
    for name in sorted(rounded):
        parts = {kind: tensors[f"{name}.{kind}"] for kind in kinds if f"{name}.{kind}" in tensors}
        with fitting(name):
            weights[f"{name}.weight"] = _finite(name, float8(name, parts, block).to(dtype))
    if rounded:
        _log.warning(
            "%d matrices in fp8 are multiplied in floating point, and their inputs are not rounded", len(rounded)
        )
    return weights


def _restored_mxfp4(tensors: Mapping[str, Tensor]) -> dict[str, Weight]:
    weights: dict[str, Weight] = {}
    for name, tensor in tensors.items():
        base = name.removesuffix(".weight_packed")
        if base != name:
            exponents = tensors.get(f"{base}.weight_scale")
            if exponents is None:
                raise BadCheckpoint(f"{base}.weight_scale is missing")
            with fitting(base):
                weights[f"{base}.weight"] = mxfp4(base, tensor.reshape(*exponents.shape, -1), exponents)
        elif f"{name.removesuffix('.weight_scale')}.weight_packed" not in tensors:
            weights[name] = tensor
    return weights
