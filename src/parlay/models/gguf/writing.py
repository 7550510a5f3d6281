"""Writes a model as a GGUF file, matrices in blocks, with the tokenizer of another file. Needs the package gguf."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from parlay.models.config import DecoderConfig
from parlay.models.gguf.reader import Strings, Value
from parlay.system.user_cache import written_whole
from parlay.types import ParlayError

if TYPE_CHECKING:
    from gguf import GGUFWriter

_TOKENIZER = "tokenizer."
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


USUAL = "Q8_0"
EMBEDDINGS = (USUAL, "Q5_0", "Q4_0")
"""The formats of an embedding, which is most of a small model's file."""
_EMBEDDING = "model.embed_tokens.weight"


def write(
    path: Path,
    config: DecoderConfig,
    tensors: Mapping[str, Tensor],
    keys: Mapping[str, Value],
    embedding: str = USUAL,
) -> None:
    """``tensors`` of a Llama by their Hugging Face names; of ``keys`` those of the tokenizer are copied.

    Matrices are Q8_0, the embedding has its own format. Rows that are no whole blocks of 32 stay float32, as vectors
    do. ``path`` is replaced in one move.
    """
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ParlayError(f"writing a GGUF file needs {error.name}: pip install 'parlay[train]'") from error
    with written_whole(path) as part:
        writer = gguf.GGUFWriter(part, "llama")
        _add_shape(writer, config)
        for name, value in keys.items():
            if name.startswith(_TOKENIZER):
                _add(writer, name, value)
        for name, tensor in tensors.items():
            rows = (
                _interleaved(tensor, config.head_dim) if name.endswith(("q_proj.weight", "k_proj.weight")) else tensor
            )
            numbers = rows.float().numpy()
            kind = gguf.GGMLQuantizationType[embedding if name == _EMBEDDING else USUAL]
            if numbers.ndim == 1 or numbers.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
                writer.add_tensor(_renamed(name), numbers)
            else:
                writer.add_tensor(_renamed(name), gguf.quantize(numbers, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _add_shape(writer: GGUFWriter, config: DecoderConfig) -> None:
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)


def _add(writer: GGUFWriter, name: str, value: Value) -> None:
    if isinstance(value, Strings):
        writer.add_array(name, value.read())
    elif isinstance(value, tuple):
        writer.add_array(name, list(value))
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        writer.add_string(name, value)


def _renamed(name: str) -> str:
    base, _, kind = name.rpartition(".")
    if base in _NAMES:
        return f"{_NAMES[base]}.{kind}"
    _, _, layer, rest = base.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.{kind}"


def _interleaved(rows_NH: Tensor, head_dim: int) -> Tensor:
    """Rows of queries or keys so that two that turn together lie side by side, as files of Llamas have them."""
    halves = rows_NH.reshape(-1, 2, head_dim // 2, rows_NH.shape[-1])
    return halves.transpose(1, 2).reshape(rows_NH.shape).contiguous()
