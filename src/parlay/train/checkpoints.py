"""Writes a trained model in the file format of its target, so that the same code opens both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from parlay.models.config import DecoderConfig
from parlay.models.gguf.blocks import encoded
from parlay.models.gguf.file import read_parts
from parlay.models.gguf.metadata import shape_keys
from parlay.models.gguf.quantizing import copied_records, gguf_tensors
from parlay.models.gguf.writing import USUAL, TensorPlan, record, write
from parlay.models.pruning.saving import smaller
from parlay.models.tokenizers.folder import copy_texts
from parlay.models.weights.formats import Format
from parlay.models.weights.fused import as_tensor
from parlay.system.user_cache import saved_whole

GGUF_NAME = "model.gguf"
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys that a student's config.json copies from the target's."""


def save_student(
    folder: Path,
    config: DecoderConfig,
    tensors: Mapping[str, Tensor],
    *,
    like: Path,
    card: str,
    embedding: str = USUAL,
    same_family: bool = False,
) -> None:
    """Write a student in the format of the model at ``like``: an 8-bit GGUF file, or a bfloat16 folder.

    Both have that model's tokenizer. ``embedding`` is the format of the embedding in a GGUF file. With ``same_family``
    the config is that model's but for the number of layers; without it the student is a Llama.
    """
    if like.is_dir():
        _save_folder(folder, tensors, like=like, card=card)
        original = json.loads((like / "config.json").read_text())
        if same_family:
            described = smaller(original, config)
        else:
            described = {**{key: original[key] for key in _KEPT if key in original}, **_described(config)}
        (folder / "config.json").write_text(json.dumps(described, indent=1) + "\n")
        return
    folder.mkdir(parents=True, exist_ok=True)
    _write_file(folder / GGUF_NAME, config, tensors, like, Format[embedding])
    (folder / "README.md").write_text(card, encoding="utf-8")


def _write_file(
    path: Path, config: DecoderConfig, tensors: Mapping[str, Tensor], like: Path, embedding: Format
) -> None:
    """Write a GGUF file with the tokenizer of the file at ``like``.

    A tensor stays float32 if it is a vector, or if the quantization's block size does not divide its rows.
    """
    header = read_parts(like)[0]
    records = [record(key, value) for key, value in shape_keys(config).items()]
    records += copied_records(header, [key for key in header.keys if key.startswith("tokenizer.")])
    found = {name: as_tensor(weight, torch.float32) for name, weight in gguf_tensors(config, tensors).items()}
    plans = []
    for name, weight in found.items():
        wanted = embedding if name == "token_embd.weight" else Format[USUAL]
        fits = weight.ndim > 1 and weight.shape[-1] % wanted.block == 0
        plans.append(TensorPlan(name, tuple(weight.shape), wanted if fits else Format.F32))
    blocks = ([encoded(plan.format, found[plan.name].reshape(-1, plan.shape[-1]))] for plan in plans)
    write(path, records, plans, blocks)


def _save_folder(folder: Path, tensors: Mapping[str, Tensor], *, like: Path, card: str) -> None:
    """Write the tensors in bfloat16, the card, and the other text files of ``like``, such as its tokenizer."""
    if not (folder.exists() and folder.samefile(like)):  # a student that learns further may be written in its place
        copy_texts(like, folder)
    (folder / "README.md").write_text(card, encoding="utf-8")
    stored = {name: weight.to(torch.bfloat16).contiguous() for name, weight in tensors.items()}
    with saved_whole(folder / "model.safetensors") as part:
        save_file(stored, part, {"format": "pt"})


def _described(config: DecoderConfig) -> dict[str, object]:
    """Return the keys of config.json that describe a Llama of this shape."""
    return {
        "architectures": [config.architecture],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
    }
