"""A GGUF file's model as a folder of bfloat16 weights, for programs that read no GGUF."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from parlay.models.config import RopeConfig
from parlay.models.loading import load_tokenizer, load_weights, read_config
from parlay.models.random_decoder import config_json
from parlay.models.weights.dequantize import dense
from parlay.models.weights.stored import StoredTensor


def save_dense(file: Path, directory: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer of a GGUF file's model into ``directory``.

    Blocks become the numbers that they stand for, rounded to bfloat16. Raises ValueError for a config that a Llama's
    config.json can't say.
    """
    config = read_config(file)
    if config.rope != RopeConfig(theta=config.rope.theta):
        raise ValueError(f"{file.name} scales its positions: only plain rotary positions can be written")
    directory.mkdir(parents=True, exist_ok=True)
    values = config_json(config) | {"rope_theta": config.rope.theta, "eos_token_id": list(config.eos_ids)}
    weights = {
        name: dense(weight, torch.bfloat16) if isinstance(weight, StoredTensor) else weight.to(torch.bfloat16)
        for name, weight in load_weights(file, config).items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    tokenizer = load_tokenizer(file)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        chat_template=tokenizer.chat_template,
        clean_up_tokenization_spaces=False,
        **tokenizer.special_tokens_map,
    ).save_pretrained(directory)
