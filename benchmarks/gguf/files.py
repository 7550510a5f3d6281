"""Makes the files that are measured: SmolLM2 in several types, and a larger model with random blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

import gguf
from benchmarks.gguf.llama import LlamaCpp
from gguf import GGMLQuantizationType as Kind

SMOLLM2 = "smollm2-135m"
MIXES = ("Q4_1", "Q4_K_M", "Q4_0", "Q8_0")
"""The types of SmolLM2's files. Its rows of 576 weights don't fill blocks of 256, so Q5_0 replaces Q4_K, and Q8_0
replaces Q6_K."""
KINDS = (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K, Kind.Q8_0)
"""The formats of the larger model's files."""
RANDOM = "llama-1.1b"


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder of the architecture llama with 1.1 B weights."""

    layers: int = 22
    hidden: int = 2048
    ffn: int = 5632
    heads: int = 32
    kv_heads: int = 4
    vocab: int = 32_000

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Return the rows and columns of each matrix, by its name in the file."""
        kv = self.hidden // self.heads * self.kv_heads
        of_layer = {
            "attn_q": (self.hidden, self.hidden),
            "attn_k": (kv, self.hidden),
            "attn_v": (kv, self.hidden),
            "attn_output": (self.hidden, self.hidden),
            "ffn_gate": (self.ffn, self.hidden),
            "ffn_up": (self.ffn, self.hidden),
            "ffn_down": (self.hidden, self.ffn),
        }
        ends = dict.fromkeys(("token_embd", "output"), (self.vocab, self.hidden))
        return ends | {f"blk.{layer}.{name}": shape for layer in range(self.layers) for name, shape in of_layer.items()}


def stored_anew(source: Path, folder: Path, mix: str, llama: LlamaCpp) -> Path:
    """Return a file of SmolLM2 in one of `MIXES`, made at the first call. ``source`` is a Q4_1 file."""
    made = folder / f"{SMOLLM2}-{mix}.gguf"
    if mix == "Q4_1":
        return source
    if not made.exists():
        llama.requantise(source, made, mix)
    return made


def random_blocks(folder: Path, kind: Kind, shape: Shape) -> Path:
    """Return a file of random blocks in one format, made at the first call. Only its speed and size are meaningful."""
    made = folder / f"{RANDOM}-{kind.name}.gguf"
    if not made.exists():
        _write(made.with_suffix(".part"), kind, shape)
        made.with_suffix(".part").rename(made)
    return made


def _write(path: Path, kind: Kind, shape: Shape) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("no_vocab")
    draw = np.random.default_rng(0)
    ones = np.ones(shape.hidden, np.float32)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(shape.layers):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", ones)
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", ones)
    for name, (rows, columns) in shape.matrices().items():
        writer.add_tensor(f"{name}.weight", _blocks(draw, kind, rows, columns), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(draw: np.random.Generator, kind: Kind, rows: int, columns: int) -> np.ndarray:
    """Return random codes with scales that keep the numbers small: uint8 ``[rows, bytes]``."""
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.frombuffer(draw.bytes(rows * columns // weights * size), np.uint8).reshape(-1, size).copy()
    scale = np.frombuffer(np.float16(1e-5 if weights == 256 else 1e-3).tobytes(), np.uint8)
    at = size - 2 if kind is Kind.Q6_K else 0
    blocks[:, at : at + 2] = scale
    if kind in (Kind.Q4_1, Kind.Q4_K):
        blocks[:, 2:4] = scale
    return blocks.reshape(rows, -1)
