"""Types of stored weights, by the names that people use: plain numbers, and GGUF's block formats of few bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from parlay.bench.forwards import weight_bytes
from parlay.bench.plan.shapes import shape_of
from parlay.models.loading import load_weights, read_config
from parlay.models.weights.formats import FORMATS, Format
from parlay.models.weights.stored import StoredTensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """The block formats of a model's matrices: ``usual``, except for the kinds of matrices in ``others``.

    ``others`` gives the formats of a kind's layers, from the first to the last. A kind is for example ``down_proj``;
    ``lm_head`` includes a tied embedding. ``name`` is unique to a mix of formats.
    """

    name: str
    usual: Format
    others: Mapping[str, tuple[Format, ...]] = field(default_factory=dict)

    def of(self, matrix: str, layers: int) -> Format:
        """Return the format of the matrix of this name in a decoder of ``layers`` layers.

        The formats in ``others`` may be fewer than the layers; they are spread evenly over them.
        """
        kind, layer = _kind_and_layer(matrix)
        formats = self.others.get(kind)
        return formats[layer * len(formats) // layers] if formats else self.usual


def _kind_and_layer(matrix: str) -> tuple[str, int]:
    """Return the kind and layer of a matrix by its Hugging Face name. Matrices outside the layers have layer 0."""
    parts = matrix.split(".")
    kind = "lm_head" if parts[-2] == "embed_tokens" else parts[-2]
    return kind, next((int(part) for part in parts if part.isdecimal()), 0)


def _mixed(name: str, usual: Format) -> Blocks:
    """Return a mix of llama.cpp whose name ends in M.

    The LM head has six bits, and so do two kinds of matrices in half of the layers.
    """
    half = (Format.Q6_K, usual)
    return Blocks(name, usual, {"v_proj": half, "down_proj": half, "lm_head": (Format.Q6_K,)})


def _with_six_bit_head(name: str, usual: Format) -> Blocks:
    return Blocks(name, usual, {"lm_head": (Format.Q6_K,)})


_NUMBERS = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0}
_MIXES: Mapping[str, tuple[float, Blocks | None]] = {
    "q6_k": (6.56, Blocks("q6_k", Format.Q6_K)),
    "q5_k_m": (5.70, _mixed("q5_k_m", Format.Q5_K)),
    "q5_k_s": (5.57, _with_six_bit_head("q5_k_s", Format.Q5_K)),
    "q4_k_m": (4.89, _mixed("q4_k_m", Format.Q4_K)),
    "q4_k_s": (4.67, _with_six_bit_head("q4_k_s", Format.Q4_K)),
    "q3_k_m": (4.00, None),
    "q2_k": (3.16, None),
    "awq": (4.25, None),
    "gptq": (4.25, None),
    "nf4": (4.13, None),
}
"""Mean bits of a weight, and the formats if Parlay has kernels for them.

The bits of mixes are llama.cpp's figures for Llama 3.1 8B; mixes keep some matrices in more bits. AWQ and GPTQ have
four bits in groups of 128 with a scale and a zero point. NF4 is QLoRA's."""


@dataclass(frozen=True, slots=True)
class WeightType:
    """A type of weights: its name, the mean bytes of a weight, and its block formats.

    ``blocks`` is None for plain numbers, and for formats for which Parlay has no kernels.
    """

    name: str
    bytes: float
    blocks: Blocks | None = None


def weight_type(name: str) -> WeightType:
    """Return the type of this name: of plain numbers, a format (``q8_0``) or a mix (``q4_k_m``).

    Raises ValueError for any other name.
    """
    lower = name.lower()
    if lower in _NUMBERS:
        return WeightType(lower, _NUMBERS[lower])
    if lower in _MIXES:
        bits, blocks = _MIXES[lower]
        return WeightType(lower, bits / 8, blocks)
    format = next((each for each in FORMATS.values() if each.name.lower() == lower and each.plain is None), None)
    if format is None:
        formats = [each.name.lower() for each in FORMATS.values() if each.plain is None]
        known = ", ".join(dict.fromkeys([*_NUMBERS, *_MIXES, *formats]))
        raise ValueError(f"weights of type {name!r} are not known: use one of {known}")
    return WeightType(lower, format.block_bytes / format.block, Blocks(lower, format))


def stored_type(file: Path) -> WeightType | None:
    """Return the type in which a GGUF file stores its weights; None if most are plain numbers.

    Its bytes of a weight are the mean over all weights that a forward reads.
    """
    config = read_config(file)
    weights = load_weights(file, config)
    stored = {name: weight for name, weight in weights.items() if isinstance(weight, StoredTensor)}
    if "lm_head.weight" in weights:  # then a forward reads only a few rows of the embedding
        stored.pop("model.embed_tokens.weight", None)
    counts: Counter[Format] = Counter()
    for weight in stored.values():
        counts[weight.format] += weight.data.nbytes
    if not counts or counts.most_common(1)[0][0].plain is not None:
        return None
    blocks = _blocks(stored, counts)
    shape = shape_of(config, weight_bytes=1, kv_bytes=2)
    return WeightType(blocks.name, weight_bytes(file, "int8") / shape.multiplied, blocks)


def _blocks(stored: Mapping[str, StoredTensor], counts: Counter[Format]) -> Blocks:
    """Return the formats of all matrices. Matrices of plain numbers count as the usual format.

    ``counts`` gives the bytes stored in each format. The format with the most is the usual one.
    """
    usual = counts.most_common(1)[0][0]
    layers: dict[str, dict[int, Format]] = {}
    for name, weight in stored.items():
        kind, layer = _kind_and_layer(name)
        layers.setdefault(kind, {})[layer] = usual if weight.format.plain else weight.format
    rows = {kind: tuple(formats for _, formats in sorted(own.items())) for kind, own in layers.items()}
    others = {kind: formats for kind, formats in rows.items() if set(formats) != {usual}}
    used = {format for formats in others.values() for format in formats} | {usual}
    total = sum(counts[format] for format in used)
    shares = [f"{round(100 * counts[format] / total)} % {format.name.lower()}" for format, _ in counts.most_common()]
    return Blocks(" and ".join(shares) if others else usual.name.lower(), usual, others)


def smaller_types(bytes_each: float) -> list[WeightType]:
    """Return the common types with at most ``bytes_each`` bytes per weight, the largest first."""
    usual = (weight_type(name) for name in ("int8", "q6_k", "q4_k_m", "q2_k"))
    return [each for each in usual if each.bytes <= bytes_each]
