"""GGUF files for tests, written by the reference package from checkpoints in folders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch import Tensor

from parlay.models.config import DecoderConfig, RopeConfig
from parlay.models.families.reading import read_config
from parlay.models.families.table import FAMILIES
from parlay.models.rope import inverse_frequencies

ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama"} | {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "LLaDAModelLM": "llada",
    "DreamModel": "dream",
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write(
    path: Path,
    checkpoint: Path,
    *,
    kind: Kind = Kind.F32,
    keys: Mapping[str, Any] | None = None,
    without: Sequence[str] = (),
    tokenizer: bool = False,
    split: int = 0,
    more: Mapping[str, tuple[np.ndarray, Kind]] | None = None,
) -> Path:
    """``checkpoint`` as a GGUF file, its matrices stored as ``kind`` where their rows are whole blocks.

    ``keys`` are added or replace others, those of ``without`` are left out. ``split``: so many tensors in each part.
    ``more`` are further tensors.
    """
    config = read_config(checkpoint)
    architecture = ARCHITECTURES[config.architecture]
    said = {**config_keys(config, architecture), **(tokenizer_keys(checkpoint) if tokenizer else {}), **(keys or {})}
    writer = gguf.GGUFWriter(path, said.pop("general.architecture", architecture), split_max_tensors=split)
    for key, value in said.items():
        if key not in without:
            add(writer, key, value)
    if config.rope.kind == "llama3":
        plain = inverse_frequencies(RopeConfig(theta=config.rope.theta), config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / inverse_frequencies(config.rope, config.head_dim)).numpy())
    for name, tensor in tensors(checkpoint, config, architecture).items():
        if name not in without:
            add_tensor(writer, name, tensor.float().numpy(), kind)
    for name, (numbers, own) in (more or {}).items():
        writer.add_tensor(name, numbers if own == Kind.F32 else gguf.quantize(numbers, own), raw_dtype=own)
    finish(writer)
    return path if not split else sorted(path.parent.glob(f"{path.stem}-*.gguf"))[0]


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer: gguf.GGUFWriter, name: str, numbers: np.ndarray, kind: Kind) -> None:
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if kind == Kind.F32 or numbers.ndim == 1 or numbers.shape[-1] % block:
        writer.add_tensor(name, numbers)
    else:
        writer.add_tensor(name, gguf.quantize(numbers, kind), raw_dtype=kind)


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    types = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, str: gguf.GGUFValueType.STRING}
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_key_value(key, value, types.get(type(value), gguf.GGUFValueType.FLOAT32))


def config_keys(config: DecoderConfig, architecture: str) -> dict[str, Any]:
    said = {
        "block_count": config.num_layers,
        "context_length": config.max_context,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope.theta,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    if config.rope.kind in ("linear", "yarn"):
        said |= {"rope.scaling.type": config.rope.kind, "rope.scaling.factor": config.rope.factor}
    if config.rope.kind == "yarn":
        said["rope.scaling.original_context_length"] = config.rope.original_max_context
    return {f"{architecture}.{name}": value for name, value in said.items()}


def tokenizer_keys(checkpoint: Path) -> dict[str, Any]:
    """Write the tokenizer of the built-in models, whose words are cut nearly as SmolLM's are."""
    said = json.loads((checkpoint / "tokenizer.json").read_text())
    vocabulary = said["model"]["vocab"]
    special = {token["content"]: token["id"] for token in said["added_tokens"]}
    tokens = sorted(vocabulary | special, key=lambda token: (vocabulary | special)[token])
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in said["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": special[settings["bos_token"]],
        "tokenizer.ggml.eos_token_id": special[settings["eos_token"]],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": (checkpoint / "chat_template.jinja").read_text(),
    }


def tensors(checkpoint: Path, config: DecoderConfig, architecture: str) -> dict[str, Tensor]:
    """Return tensors under their GGUF names, with the rows of queries and keys interleaved if the architecture wants
    it."""
    weights = load_file(checkpoint / "model.safetensors")
    renamed: dict[str, Tensor] = {}
    renamed_by = FAMILIES[config.architecture].renamed
    for name, tensor in ((renamed_by(name), tensor) for name, tensor in weights.items()):
        if name == "lm_head.weight" and config.tie_embeddings:
            continue
        turned = architecture in ("llama", "llada") and ("q_proj" in name or "k_proj" in name)
        renamed[_renamed(name)] = pairs(tensor, config.head_dim) if turned else tensor
    return renamed


def _renamed(name: str) -> str:
    base, _, kind = name.rpartition(".")
    if base in NAMES:
        return f"{NAMES[base]}.{kind}"
    _, _, layer, rest = base.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def pairs(rows: Tensor, head_dim: int) -> Tensor:
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape).contiguous()


def numbers(tensor: torch.Tensor, kind: Kind) -> Tensor:
    """Compute what is left of a matrix that was stored as ``kind``."""
    return torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.float().numpy(), kind), kind))
