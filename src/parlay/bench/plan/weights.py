"""How weights are stored, by the names that people use: numbers, and the blocks of few bits that GGUF files hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from parlay.bench.forwards import weight_bytes
from parlay.bench.plan.shapes import shape_of
from parlay.models.loading import load_weights, read_config
from parlay.models.weights.formats import Format
from parlay.models.weights.stored import StoredTensor

_NUMBERS = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0}
_MIXES: Mapping[str, tuple[float, Format | None]] = {
    "q6_k": (6.56, Format.Q6_K),
    "q5_k_m": (5.70, Format.Q5_K),
    "q5_k_s": (5.57, Format.Q5_K),
    "q4_k_m": (4.89, Format.Q4_K),
    "q4_k_s": (4.67, Format.Q4_K),
    "q3_k_m": (4.00, None),
    "q2_k": (3.16, None),
    "awq": (4.25, None),
    "gptq": (4.25, None),
    "nf4": (4.13, None),
}
"""Bits of a weight, and the format of most of them if Parlay multiplies it: llama.cpp's figures for Llama 3.1 8B,
whose mixes keep some matrices in more bits; four bits in groups of 128 with a scale and a zero; NF4 of QLoRA."""


@dataclass(frozen=True, slots=True)
class WeightType:
    """A name, the mean bytes of a weight, and the format of its blocks; None for plain numbers or formats of others."""

    name: str
    bytes: float
    blocks: Format | None = None


def weight_type(name: str) -> WeightType:
    """The type of that name: a number's, a format's (``q8_0``), or a mix's (``q4_k_m``). Raises ValueError."""
    lower = name.lower()
    if lower in _NUMBERS:
        return WeightType(lower, _NUMBERS[lower])
    if lower in _MIXES:
        bits, blocks = _MIXES[lower]
        return WeightType(lower, bits / 8, blocks)
    format = next((each for each in Format if each.name.lower() == lower and each.plain is None), None)
    if format is None:
        formats = [each.name.lower() for each in Format if each.plain is None]
        known = ", ".join(dict.fromkeys([*_NUMBERS, *_MIXES, *formats]))
        raise ValueError(f"weights of type {name!r} are not known: use one of {known}")
    return WeightType(lower, format.block_bytes / format.block, format)


def stored_type(file: Path) -> WeightType | None:
    """How a GGUF file stores most of its weights, with the bytes of a weight in the mean over all that a forward reads.

    None for plain numbers.
    """
    config = read_config(file)
    counts: Counter[Format] = Counter()
    for weight in load_weights(file, config).values():
        if isinstance(weight, StoredTensor):
            counts[weight.format] += weight.data.nbytes
    if not counts or counts.most_common(1)[0][0].plain is not None:
        return None
    format = counts.most_common(1)[0][0]
    shape = shape_of(config, weight_bytes=1, kv_bytes=2)
    return WeightType(format.name.lower(), weight_bytes(file, "int8") / shape.multiplied, format)


def smaller_types(bytes_each: float) -> list[WeightType]:
    """The usual types with at most so many bytes a weight, the largest first."""
    usual = (weight_type(name) for name in ("int8", "q6_k", "q4_k_m", "q2_k"))
    return [each for each in usual if each.bytes <= bytes_each]
