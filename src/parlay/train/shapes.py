"""Sizes of models that can be trained from scratch."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import Qwen3Config

CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Qwen3-shaped decoder."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int

    def config(self, vocab_size: int, end: int, start: int | None = None) -> Qwen3Config:
        """The ``transformers`` configuration."""
        return Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=CONTEXT,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            tie_word_embeddings=True,
            eos_token_id=end,
            bos_token_id=start,
            use_cache=False,
        )


SHAPES = {
    "mini": Shape(hidden=256, layers=6, heads=8, kv_heads=4, head_dim=64, ffn=768),
    "mini-draft": Shape(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=384),
    "tiny": Shape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64),
}
