"""Writes a pruned model as a safetensors folder that transformers and others can open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from parlay.models.config import DecoderConfig, Json, read_json
from parlay.models.gguf.tokenizer import load_tokenizer
from parlay.models.random_decoder import config_json
from parlay.models.tokenizers.folder import copy_texts, save_tokenizer
from parlay.system.user_cache import saved_whole
from parlay.types import ParlayError

_OWN_NAMES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose checkpoints use the decoder's names of weights."""
_GONE = ("layer_types", "max_window_layers", "torch_dtype", "quantization_config")
"""Keys that are dropped: lists of layers, the older name of dtype, and quantization."""


def smaller(fields: Json, config: DecoderConfig) -> dict[str, Any]:
    """A model's config.json ``fields`` with the pruned numbers of layers and inner units."""
    kept = {key: value for key, value in fields.items() if key not in _GONE}
    sizes = {"num_hidden_layers": config.num_layers, "intermediate_size": config.intermediate_size}
    return {**kept, **sizes, "dtype": "bfloat16"}


def described(config: DecoderConfig, source: Path) -> dict[str, Any]:
    """The config.json of a pruned decoder whose weights have the decoder's names.

    Raises ParlayError for a model that no config.json of a Llama, Qwen2 or Qwen3 describes.
    """
    if source.is_dir() and config.architecture in _OWN_NAMES:
        return smaller(read_json(source / "config.json"), config)
    scales = config.embedding_scale, config.logit_scale, config.logit_cap, config.rope.attention_factor
    if config.rope.kind != "default" or config.rope.rotated or scales != (1, 1, 0, 1):
        raise ParlayError(
            f"{config.architecture}: no config.json of a Llama, Qwen2 or Qwen3 says how its positions are stretched or "
            "its numbers scaled: if it is a GGUF file, prune the folder that it was made from"
        )
    try:
        fields = config_json(config)
    except ValueError as error:
        raise ParlayError(f"{config.architecture}: {error}") from None
    fields |= {"rope_theta": config.rope.theta, "hidden_act": "silu"}
    return {**fields, "eos_token_id": list(config.eos_ids)} if config.eos_ids else fields


def save(folder: Path, config_said: Json, tensors: Mapping[str, Tensor], *, source: Path) -> None:
    """Write weights, config.json and tokenizer; ``source`` is the folder or GGUF file that was pruned.

    Raises ParlayError if that fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            copy_texts(source, folder)
        else:
            save_tokenizer(load_tokenizer(source), folder)
        (folder / "config.json").write_text(json.dumps(config_said, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ParlayError(f"can't write to {folder}: {error.strerror or error}") from None
    with saved_whole(folder / "model.safetensors") as part:
        save_file({name: weight.contiguous() for name, weight in tensors.items()}, part, {"format": "pt"})
