"""Enlarges a trained checkpoint to any size without changing a bit of its logits.

The result writes the same text as the trained model, with the same acceptance of drafts, at the cost of a larger model.
The hidden size grows by a factor r, a power of 4, and is padded with zeros. A mean square over r times as many numbers
is r times smaller, so norm weights are divided by sqrt(r) and the norms' epsilon by r; both divisions are exact.
Weights that only meet zeros, and the heads and feed-forward units whose output is multiplied by zero, are filled with
random numbers. Added layers have zero output projections.

A matrix product rounds differently if its sums are cut into other blocks. oneDNN (measured) adds up to 1024 terms in
one block, and more in blocks of 512. So shapes that keep the same blocks are preferred; `same_sums` recognizes them.

An added layer changes nothing, so early exit and layer skipping look better on a widened model than they are.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from parlay.models.config import DecoderConfig, read_json
from parlay.models.families.reading import read_config
from parlay.models.loading import load_tensors
from parlay.models.weights.shapes import weight_shapes

_TOLERANCE = 0.05
_WHOLE = 1024
"""The most terms of a sum that oneDNN adds in one block; it cuts longer sums into blocks of _BLOCK."""
_BLOCK = 512
_SHAPED_FILES = ("config.json", "provenance.json", "model.safetensors.index.json")
_NORM_SUFFIXES = ("layernorm.weight", "model.norm.weight")
_ZERO_FILLED = ("model.embed_tokens.weight", "o_proj.weight", "down_proj.weight")
"""Weights that add to the hidden state: their new rows and columns must add nothing."""


def widen(checkpoint_dir: Path, out_dir: Path, params: int, *, seed: int = 0) -> DecoderConfig:
    """Write a checkpoint of about ``params`` parameters whose logits equal those of ``checkpoint_dir``.

    The logits are equal in exact arithmetic, and bit for bit in the native decoder on CPU if `same_sums` holds for the
    shape. The number of parameters is within 5 % of ``params``. Tokenizer files are copied; ``provenance.json`` names
    the source. Returns the new shape. Raises ValueError if no shape has about ``params`` parameters.
    """
    narrow = read_config(checkpoint_dir)
    wide = choose_shape(narrow, params)
    weights = load_tensors(checkpoint_dir, narrow)
    generator = torch.Generator().manual_seed(seed)
    root = math.isqrt(wide.hidden_size // narrow.hidden_size)
    grown = {}
    for name, shape in weight_shapes(wide).items():
        grown[name] = _filling(name, shape, weights["model.norm.weight"].dtype, generator)
        if name in weights:
            corner = tuple(slice(size) for size in weights[name].shape)
            grown[name][corner] = weights[name] / (root if _is_scaled(name, wide) else 1)
    out_dir.mkdir(parents=True, exist_ok=True)
    # Files of the tokenizer and of generation: everything but weights and what names a shape.
    wanted = (".json", ".jinja", ".txt", ".model")
    for path in [path for path in checkpoint_dir.iterdir() if path.suffix in wanted and path.name not in _SHAPED_FILES]:
        shutil.copyfile(path, out_dir / path.name)
    save_file(grown, out_dir / "model.safetensors", metadata={"format": "pt"})
    _write_json(out_dir / "config.json", _config_json(checkpoint_dir, wide))
    _write_json(out_dir / "provenance.json", _provenance(checkpoint_dir, narrow, wide, seed))
    return wide


def count_parameters(config: DecoderConfig) -> int:
    return sum(math.prod(shape) for shape in weight_shapes(config).values())


def choose_shape(narrow: DecoderConfig, params: int) -> DecoderConfig:
    """Return the shape near ``params`` that keeps the logits' bits, if there is one, and of these the one with the most
    usual proportions.

    Usual proportions keep the ratio of feed-forward size to hidden size, and have 64 hidden units per layer.
    """
    if params <= count_parameters(narrow):
        raise ValueError(f"params {params}: the checkpoint has {count_parameters(narrow)} already; ask for more")
    candidates = [shape for shape in _shapes(narrow, params) if abs(count_parameters(shape) / params - 1) < _TOLERANCE]
    if not candidates:
        raise ValueError(f"params {params}: no shape within 5 % of it; ask for more")
    return min(candidates, key=lambda shape: (not same_sums(narrow, shape), _strangeness(shape, narrow)))


def same_sums(narrow: DecoderConfig, wide: DecoderConfig) -> bool:
    """Whether each matrix product of the wide model adds the narrow model's terms in the same order."""
    sums = [
        (narrow.hidden_size, wide.hidden_size),
        (narrow.intermediate_size, wide.intermediate_size),
        (narrow.num_heads * narrow.head_dim, wide.num_heads * wide.head_dim),
    ]
    return all(few <= _BLOCK or few > _WHOLE or many <= _WHOLE for few, many in sums)


def _shapes(narrow: DecoderConfig, params: int) -> Iterator[DecoderConfig]:
    for ratio in (1, 4, 16, 64):
        for layers in range(narrow.num_layers, 8 * narrow.num_layers + 1):
            shape = replace(
                narrow,
                hidden_size=ratio * narrow.hidden_size,
                num_heads=ratio * narrow.num_heads,
                num_kv_heads=ratio * narrow.num_kv_heads,
                num_layers=layers,
                rms_norm_eps=narrow.rms_norm_eps / ratio,
            )
            rest = params - count_parameters(replace(shape, intermediate_size=0))
            inner = round(rest / (3 * shape.hidden_size * layers) / 64) * 64
            for size in {inner, min(inner, _WHOLE)}:
                if size >= narrow.intermediate_size:
                    yield replace(shape, intermediate_size=size)


def _strangeness(shape: DecoderConfig, narrow: DecoderConfig) -> float:
    inner = shape.intermediate_size / shape.hidden_size / (narrow.intermediate_size / narrow.hidden_size)
    return abs(math.log(inner)) + 0.5 * abs(math.log(shape.hidden_size / shape.num_layers / 64))


def _filling(name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return a wide weight of numbers that change no logit. The narrow weight overwrites its corner."""
    if name.endswith(_ZERO_FILLED):
        return torch.zeros(shape, dtype=dtype)
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    return torch.empty(shape, dtype=dtype).uniform_(-0.05, 0.05, generator=generator)


def _is_scaled(name: str, wide: DecoderConfig) -> bool:
    """Whether a weight is divided by sqrt(r): norm weights, and the projections of queries and keys that are normed.

    The norm of queries and keys uses the same epsilon, which shrank by r. So its inputs must shrink by sqrt(r) for the
    same result.
    """
    normed = wide.qk_norm and ("q_proj" in name or "k_proj" in name)
    return normed or name.endswith(_NORM_SUFFIXES)


def _config_json(checkpoint_dir: Path, wide: DecoderConfig) -> dict[str, object]:
    raw = read_json(checkpoint_dir / "config.json")
    raw |= {
        "hidden_size": wide.hidden_size,
        "intermediate_size": wide.intermediate_size,
        "num_hidden_layers": wide.num_layers,
        "num_attention_heads": wide.num_heads,
        "num_key_value_heads": wide.num_kv_heads,
        "head_dim": wide.head_dim,
        "rms_norm_eps": wide.rms_norm_eps,
    }
    if raw.get("layer_types"):
        raw["layer_types"] = ["full_attention"] * wide.num_layers
    return raw


def _provenance(checkpoint_dir: Path, narrow: DecoderConfig, wide: DecoderConfig, seed: int) -> dict[str, object]:
    path = checkpoint_dir / "provenance.json"
    return {
        "made_by": "parlay.testing.widen",
        "widened_from": checkpoint_dir.name,
        "parameters_before": count_parameters(narrow),
        "parameters": count_parameters(wide),
        "hidden_ratio": wide.hidden_size // narrow.hidden_size,
        "layers_added": wide.num_layers - narrow.num_layers,
        "same_sums": same_sums(narrow, wide),
        "seed": seed,
        "source": read_json(path) if path.exists() else None,
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
