"""Checkpoints of any shape with random weights, for measuring the cost of forwards; their text is meaningless."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from parlay.models.config import DecoderConfig
from parlay.models.weights.formats import Format
from parlay.models.weights.shapes import Weight, weight_shapes
from parlay.models.weights.stored import StoredTensor


def save_decoder(config: DecoderConfig, directory: Path, *, seed: int = 0) -> None:
    """Write config.json and model.safetensors (bfloat16) of a Llama of this shape into ``directory``.

    Raises ValueError for a config that a Llama's config.json can't express.
    """
    text = json.dumps(config_json(config), indent=2) + "\n"
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: _filling(shape, generator) for name, shape in weight_shapes(config).items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(text, encoding="utf-8")


def _filling(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random weights that keep the scale of hidden states; norms are ones."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, shape[-1] ** -0.5, generator=generator)


def random_weights(config: DecoderConfig, format_of: Callable[[str], Format], *, seed: int = 0) -> dict[str, Weight]:
    """Random weights of `save_decoder`'s Llama, each matrix in the format that ``format_of`` returns for its Hugging
    Face name.

    Bytes are below 32, so every scale is finite and small, wherever it is in a block. Raises ValueError unless rows are
    whole blocks.
    """
    draw = torch.Generator().manual_seed(seed)

    def filled(name: str, shape: tuple[int, ...]) -> Weight:
        if len(shape) == 1:
            return torch.ones(shape)
        format = format_of(name)
        size = (*shape[:-1], format.row_bytes(shape[-1]))
        return StoredTensor(format, shape, torch.randint(0, 32, size, dtype=torch.uint8, generator=draw))

    return {name: filled(name, shape) for name, shape in weight_shapes(config).items()}


def config_json(config: DecoderConfig) -> dict[str, object]:
    """The config.json of a Llama, Qwen2 (biases) or Qwen3 (query and key norms) stored in bfloat16.

    Rotary parameters and end tokens are left out. Raises ValueError for a config that none of these can express.
    """
    families = {(False, False): "Llama", (True, False): "Qwen2", (False, True): "Qwen3"}
    family = families.get((config.qkv_bias, config.qk_norm))
    if family is None or config.layers:
        raise ValueError("these checkpoints are plain Llamas, Qwen2 or Qwen3: remove layers of other forms")
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": "bfloat16",
    }
