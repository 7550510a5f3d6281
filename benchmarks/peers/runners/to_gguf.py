"""Converts a Qwen3 checkpoint to a GGUF file of the same precision: bf16 matrices, and norms in fp32 as llama.cpp
has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

FAMILY = gguf.MODEL_ARCH.QWEN3
BF16 = gguf.GGMLQuantizationType.BF16


def convert(checkpoint: Path, out: Path) -> None:
    """Write ``out`` completely or not at all. Raises ValueError for another family, or weights that are not bf16."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "qwen3":
        raise ValueError(f"only qwen3 is converted to GGUF here, and {checkpoint.name} is {config['model_type']}")
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f"{out.name}.part")  # not the name of another engine's conversion
    writer = gguf.GGUFWriter(unfinished, gguf.MODEL_ARCH_NAMES[FAMILY])
    _add_shape(writer, config)
    _add_vocabulary(writer, json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8")), config)
    names = gguf.get_tensor_name_map(FAMILY, config["num_hidden_layers"])
    for name, bits in bf16_tensors(checkpoint):
        renamed = names.get_name(name, try_suffixes=(".weight",))
        if renamed is None:
            raise ValueError(f"GGUF has no name for {name}")
        if bits.ndim > 1:
            writer.add_tensor(renamed, bits.view(np.uint8), raw_dtype=BF16)
        else:
            writer.add_tensor(renamed, (bits.astype(np.uint32) << 16).view(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(out)


def bf16_tensors(checkpoint: Path) -> Iterator[tuple[str, npt.NDArray[np.uint16]]]:
    """Yield the names and bits of all weights. A safetensors file holds a length, a JSON index, and the bytes."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        data = np.memmap(path, np.uint8, "r")
        size = int(data[:8].view(np.uint64)[0])
        index: dict[str, Any] = json.loads(data[8 : 8 + size].tobytes())
        index.pop("__metadata__", None)
        for name, entry in index.items():
            if entry["dtype"] != "BF16":
                raise ValueError(f"{name} is {entry['dtype']}, and only BF16 is converted")
            begin, end = entry["data_offsets"]
            values = np.frombuffer(data[8 + size + begin : 8 + size + end].tobytes(), np.uint16)
            yield name, values.reshape(entry["shape"])


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _add_vocabulary(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """Add tokens and merges. How llama.cpp would split text does not matter, because prompts are token ids."""
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    special = {entry["id"]: entry["content"] for entry in tokenizer["added_tokens"]}
    texts = {number: text for text, number in vocabulary.items()} | special
    kinds = (gguf.TokenType.CONTROL, gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([texts.get(number, f"[unused{number}]") for number in range(config["vocab_size"])])
    writer.add_token_types([kinds[number not in special] for number in range(config["vocab_size"])])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
