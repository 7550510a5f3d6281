"""Tiny diffusion checkpoints with random weights in the layouts of the field, and a slow reference for each.

transformers has none of these models, so layouts are written here as their papers and configs describe them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from parlay.testing.toy_tokenizers import toy_tokenizer

HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS, VOCAB = 32, 48, 4, 2, 8, 2, 64
MASK = VOCAB - 4

_QWEN = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_LLADA = {
    "d_model": HIDDEN,
    "mlp_hidden_size": INNER,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "n_kv_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "embedding_size": VOCAB,
    "max_sequence_length": 256,
    "rope": True,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "activation_type": "silu",
    "block_type": "llama",
    "layer_norm_type": "rms",
    "weight_tying": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "multi_query_attention": None,
    "eos_token_id": 2,
}
_QWEN_NAMES = {
    "embed": "model.embed_tokens",
    "final": "model.norm",
    "head": "lm_head",
    "norm1": "model.layers.{}.input_layernorm",
    "norm2": "model.layers.{}.post_attention_layernorm",
    **{name: f"model.layers.{{}}.self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"model.layers.{{}}.mlp.{name}_proj" for name in ("gate", "up", "down")},
    **{f"{name}_norm": f"model.layers.{{}}.self_attn.{name}_norm" for name in "qk"},
}
_LLADA_NAMES = {
    "embed": "model.transformer.wte",
    "final": "model.transformer.ln_f",
    "head": "model.transformer.ff_out",
    "norm1": "model.transformer.blocks.{}.attn_norm",
    "norm2": "model.transformer.blocks.{}.ff_norm",
    **{name: f"model.transformer.blocks.{{}}.{name}_proj" for name in "qkv"},
    "o": "model.transformer.blocks.{}.attn_out",
    "gate": "model.transformer.blocks.{}.ff_proj",
    "up": "model.transformer.blocks.{}.up_proj",
    "down": "model.transformer.blocks.{}.ff_out",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a family's files look, and who sees whom: its ``block`` (0: all rows see each other) and ``shift``.

    With a ``canvas`` of so many places the text is causal, and the last rows see each other.
    """

    architecture: str
    config: Mapping[str, object]
    names: Mapping[str, str]
    block: int = 0
    shift: bool = False
    bias: bool = False
    qk_norm: bool = False
    canvas: int = 0

    @property
    def text(self) -> Literal["causal", "block", "full"]:
        return "causal" if self.canvas else "block" if self.block else "full"


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "llada": Layout(architecture="LLaDAModelLM", config={**_LLADA, "model_type": "llada"}, names=_LLADA_NAMES),
        "dream": Layout(
            architecture="DreamModel",
            config={**_QWEN, "model_type": "Dream"},
            names=_QWEN_NAMES,
            shift=True,
            bias=True,
        ),
        "fast-dllm": Layout(
            architecture="Fast_dLLM_QwenForCausalLM",
            config={**_QWEN, "model_type": "Fast_dLLM_Qwen", "bd_size": 8},
            names=_QWEN_NAMES,
            block=8,
            shift=True,
            bias=True,
        ),
        "fast-dllm-32": Layout(
            architecture="Fast_dLLM_QwenForCausalLM",
            config={**_QWEN, "model_type": "Fast_dLLM_Qwen"},
            names=_QWEN_NAMES,
            block=32,
            shift=True,
            bias=True,
        ),
        "sdar": Layout(
            architecture="SDARForCausalLM",
            config={**_QWEN, "model_type": "sdar", "head_dim": DIM},
            names=_QWEN_NAMES,
            block=4,
            qk_norm=True,
        ),
        "nemotron": Layout(
            architecture="NemotronLabsDiffusionModel",
            config={
                **_QWEN,
                "model_type": "nemotron_labs_diffusion",
                "head_dim": DIM,
                "block_size": 8,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10_000.0,
                    "llama_4_scaling_beta": 0.1,
                    "original_max_position_embeddings": 128,
                },
            },
            names={
                part: "diffusion_head" if part == "head" else name.replace("model.", "encoder.")
                for part, name in _QWEN_NAMES.items()
            },
            canvas=8,
        ),
        "a2d": Layout(
            architecture="A2DQwen3LMHeadModel",
            config={**_QWEN, "model_type": "a2d-qwen3", "head_dim": DIM},
            names=_QWEN_NAMES,
            qk_norm=True,
        ),
    }
)


def save_diffusion(name: str, directory: Path, *, seed: int = 0, vocab: int = VOCAB) -> SlowDiffusion:
    """Write a random checkpoint of this layout into ``directory``, and return its slow reference.

    The mask is the fourth token from the end. A reference of another vocabulary gives logits alone.
    """
    layout, draw = LAYOUTS[name], torch.Generator().manual_seed(seed)
    weights = {
        file_name: torch.randn(shape, generator=draw) * (2 * shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
        + (1 if "norm" in key or key == "final" else 0)
        for key, file_name, shape in _shapes(layout, vocab)
    }
    directory.mkdir(parents=True, exist_ok=True)
    config = {**layout.config, "architectures": [layout.architecture], "dtype": "float32", "mask_token_id": vocab - 4}
    config |= {name: vocab for name in ("vocab_size", "embedding_size") if name in config}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    toy_tokenizer(vocab).save_pretrained(directory)
    return SlowDiffusion(layout, weights)


def _shapes(layout: Layout, vocab: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """Part, name in the file, and shape of each weight."""
    whole = {"embed": (vocab, HIDDEN), "final": (HIDDEN,), "head": (vocab, HIDDEN)}
    query, key = HEADS * DIM, KV_HEADS * DIM
    layer: dict[str, tuple[int, ...]] = {
        "norm1": (HIDDEN,), "norm2": (HIDDEN,), "q": (query, HIDDEN), "k": (key, HIDDEN), "v": (key, HIDDEN),
        "o": (HIDDEN, query), "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER),
    }  # fmt: skip
    if layout.qk_norm:
        layer |= {"q_norm": (DIM,), "k_norm": (DIM,)}
    found = [(part, f"{layout.names[part]}.weight", shape) for part, shape in whole.items()]
    for number in range(LAYERS):
        for part, shape in layer.items():
            found.append((part, f"{layout.names[part].format(number)}.weight", shape))
            if layout.bias and part in "qkv":
                found.append((part, f"{layout.names[part].format(number)}.bias", shape[:1]))
    return found


class SlowDiffusion:
    """The model by plain operators, without a cache: every row of a text is computed for every step."""

    def __init__(self, layout: Layout, weights: Mapping[str, Tensor]) -> None:
        self.layout, self._weights = layout, weights

    def logits(self, ids: Sequence[int], places: int = 0) -> Tensor:
        """``[T, V]``: each row sees all rows, or those before the end of its block.

        In causal texts it sees those before it, and the last ``places`` rows see all.
        """
        rows = torch.arange(len(ids))
        block = 1 if self.layout.canvas else self.layout.block or len(ids)
        seen_TT = rows[None] < (rows[:, None] // block + 1) * block
        seen_TT |= rows[:, None] >= len(ids) - places
        x_TH = self._of("embed")[list(ids)]
        for layer in range(LAYERS):
            x_TH = x_TH + self._attention(layer, self._normed("norm1", x_TH, layer), seen_TT)
            normed = self._normed("norm2", x_TH, layer)
            gated = torch.nn.functional.silu(normed @ self._of("gate", layer).T) * (normed @ self._of("up", layer).T)
            x_TH = x_TH + gated @ self._of("down", layer).T
        return self._normed("final", x_TH) @ self._of("head").T

    def write(self, prompt: Sequence[int], length: int, *, canvas: int, k: int, group: int = 0) -> list[int]:
        """``length`` greedy tokens: in each step the ``k`` surest places of the first ``group`` that has an open one.

        Without a block each canvas has ``canvas`` places.
        """
        text, end, block = list(prompt), len(prompt) + length, self.layout.block
        while len(text) < end:
            size = block - len(text) % block if block else self.layout.canvas or canvas
            places: list[int | None] = [None] * min(size, end - len(text))
            first = len(text) if block else 0
            while None in places:
                logits = self.logits([*text, *(MASK if token is None else token for token in places)], len(places))
                rows = logits[len(text) - 1 : -1] if self.layout.shift else logits[len(text) :]
                rows[:, MASK] = -torch.inf
                probs = rows.double().softmax(-1)
                open_places = [place for place, token in enumerate(places) if token is None]
                if group:
                    now = (first + open_places[0]) // group
                    open_places = [place for place in open_places if (first + place) // group == now]
                for place in sorted(open_places, key=lambda place: -probs[place].max().item())[:k]:
                    places[place] = int(rows[place].argmax())
            text += [token for token in places if token is not None]
        return text[len(prompt) :]

    def _of(self, part: str, layer: int = 0, kind: str = "weight") -> Tensor:
        return self._weights[f"{self.layout.names[part].format(layer)}.{kind}"]

    def _normed(self, part: str, x_TH: Tensor, layer: int = 0) -> Tensor:
        normed: Tensor = x_TH * (x_TH.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self._of(part, layer)
        return normed

    def _attention(self, layer: int, x_TH: Tensor, seen_TT: Tensor) -> Tensor:
        def heads(part: str, count: int) -> Tensor:
            bias = self._of(part, layer, "bias") if self.layout.bias else 0
            return (x_TH @ self._of(part, layer).T + bias).view(len(x_TH), count, DIM).transpose(0, 1)

        queries, keys, values = heads("q", HEADS), heads("k", KV_HEADS), heads("v", KV_HEADS)
        if self.layout.qk_norm:
            queries, keys = self._normed("q_norm", queries, layer), self._normed("k_norm", keys, layer)
        queries, keys = _turned(queries), _turned(keys)
        keys, values = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (keys, values))
        scores = (queries @ keys.mT * DIM**-0.5).masked_fill(~seen_TT, -torch.inf)
        mixed_TH = (scores.softmax(-1) @ values).transpose(0, 1).reshape(len(x_TH), -1)
        out_TH: Tensor = mixed_TH @ self._of("o", layer).T
        return out_TH


def _turned(heads_ATD: Tensor) -> Tensor:
    """Rotary positions: halves of a head turn together."""
    length, half = heads_ATD.shape[1], DIM // 2
    angles = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    left, right = heads_ATD[..., :half], heads_ATD[..., half:]
    return torch.cat((left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()), -1)
