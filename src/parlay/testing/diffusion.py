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

from parlay.models.config import Experts
from parlay.testing.toy_tokenizers import toy_tokenizer

HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS, VOCAB = 32, 48, 4, 2, 8, 2, 64
EXPERTS = 6
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
_CHOSEN = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}
_EXPERT_NAMES = {
    "router": "model.layers.{}.mlp.gate",
    **{part: f"model.layers.{{}}.mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
}
_LLADA2_NAMES = {
    **_QWEN_NAMES,
    **_EXPERT_NAMES,
    "embed": "model.word_embeddings",
    "qkv": "model.layers.{}.attention.query_key_value",
    "o": "model.layers.{}.attention.dense",
    "q_norm": "model.layers.{}.attention.query_layernorm",
    "k_norm": "model.layers.{}.attention.key_layernorm",
    **{f"shared_{part}": f"model.layers.{{}}.mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
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

    With a ``canvas`` of so many places the text is causal, and the last rows see each other. Of a head ``rotated``
    numbers turn. ``experts`` take the place of feed-forwards.
    """

    architecture: str
    config: Mapping[str, object]
    names: Mapping[str, str]
    block: int = 0
    shift: bool = False
    bias: bool = False
    qk_norm: bool = False
    canvas: int = 0
    rotated: int = DIM
    experts: Experts | None = None

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
        "sdar-moe": Layout(
            architecture="SDARMoeForCausalLM",
            config={**_QWEN, "model_type": "sdar_moe", "head_dim": DIM, **_CHOSEN, "norm_topk_prob": True},
            names={**_QWEN_NAMES, **_EXPERT_NAMES},
            block=4,
            qk_norm=True,
            experts=Experts(count=EXPERTS, chosen=2, size=INNER),
        ),
        "llada-moe": Layout(
            architecture="LLaDAMoEModelLM",
            config={
                **{name: value for name, value in _QWEN.items() if name != "intermediate_size"},
                "model_type": "llada",
                "dense_intermediate_size": INNER,
                "expert_intermediate_size": INNER,
                "num_experts": EXPERTS,
                "num_experts_per_tok": 2,
                "norm_topk_prob": None,
                "qk_layernorm": True,
            },
            names={**_QWEN_NAMES, **_EXPERT_NAMES},
            qk_norm=True,
            experts=Experts(count=EXPERTS, chosen=2, size=INNER, normalized=False),
        ),
        "llada2": Layout(
            architecture="LLaDA2MoeModelLM",
            config={
                **_QWEN,
                "model_type": "llada2_moe",
                "head_dim": DIM,
                **_CHOSEN,
                "first_k_dense_replace": 0,
                "num_shared_experts": 1,
                "n_group": 3,
                "topk_group": 2,
                "routed_scaling_factor": 2.5,
                "block_size": 4,
                "partial_rotary_factor": 0.5,
                "score_function": "sigmoid",
                "use_qk_norm": True,
            },
            names=_LLADA2_NAMES,
            block=4,
            qk_norm=True,
            rotated=DIM // 2,
            experts=Experts(
                count=EXPERTS, chosen=2, size=INNER, shared=INNER, scale=2.5, sigmoid=True, groups=3, top_groups=2
            ),
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
        "o": (HIDDEN, query),
    }  # fmt: skip
    gated: dict[str, tuple[int, ...]] = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    if "qkv" in layout.names:
        layer = {part: shape for part, shape in layer.items() if part not in "qkv"} | {"qkv": (query + 2 * key, HIDDEN)}
    if layout.experts is None:
        layer |= gated
    else:
        layer["router"] = (EXPERTS, HIDDEN)
    if layout.experts is not None and layout.experts.shared:
        layer |= {f"shared_{part}": shape for part, shape in gated.items()}
    if layout.qk_norm:
        layer |= {"q_norm": (DIM,), "k_norm": (DIM,)}
    found = [(part, f"{layout.names[part]}.weight", shape) for part, shape in whole.items()]
    for number in range(LAYERS):
        for part, shape in layer.items():
            found.append((part, f"{layout.names[part].format(number)}.weight", shape))
            if layout.bias and part in "qkv":
                found.append((part, f"{layout.names[part].format(number)}.bias", shape[:1]))
        for expert in range(EXPERTS if layout.experts is not None else 0):
            found += [
                (part, f"{layout.names[part].format(number, expert)}.weight", shape) for part, shape in gated.items()
            ]
        if layout.experts is not None and layout.experts.sigmoid:
            found.append(("choice", f"{layout.names['router'].format(number)}.expert_bias", (EXPERTS,)))
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
            x_TH = x_TH + (self._gated(normed, layer) if self.layout.experts is None else self._mixed(normed, layer))
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

    def _of(self, part: str, layer: int = 0, kind: str = "weight", expert: int = 0) -> Tensor:
        return self._weights[f"{self.layout.names[part].format(layer, expert)}.{kind}"]

    def _gated(self, x_TH: Tensor, layer: int, expert: int = 0, of: str = "") -> Tensor:
        gate, up, down = (self._of(f"{of}{part}", layer, expert=expert) for part in ("gate", "up", "down"))
        out_TH: Tensor = torch.nn.functional.silu(x_TH @ gate.T) * (x_TH @ up.T) @ down.T
        return out_TH

    def _mixed(self, x_TH: Tensor, layer: int) -> Tensor:
        """Row by row: the experts that it chooses, and the shared one."""
        rows = []
        for x_H in x_TH:
            weights = self._chosen(self._of("router", layer) @ x_H, layer)
            rows.append(sum(weight * self._gated(x_H, layer, expert) for expert, weight in weights.items()))
        mixed_TH = torch.stack([torch.as_tensor(row) for row in rows])
        shared = self.layout.experts is not None and self.layout.experts.shared
        return mixed_TH + self._gated(x_TH, layer, of="shared_") if shared else mixed_TH

    def _chosen(self, logits_E: Tensor, layer: int) -> dict[int, float]:
        form = self.layout.experts
        assert form is not None
        scores = (logits_E.sigmoid() if form.sigmoid else logits_E.softmax(-1)).tolist()
        choice = list(scores)
        if form.sigmoid:
            bias, size = self._of("router", layer, "expert_bias").tolist(), EXPERTS // form.groups
            choice = [score + own for score, own in zip(scores, bias, strict=True)]
            sums = [sum(sorted(choice[group * size :][:size])[-2:]) for group in range(form.groups)]
            opened = sorted(range(form.groups), key=lambda group: -sums[group])[: form.top_groups]
            choice = [each if expert // size in opened else -torch.inf for expert, each in enumerate(choice)]
        best = sorted(range(EXPERTS), key=lambda expert: -choice[expert])[: form.chosen]
        total = sum(scores[expert] for expert in best) if form.normalized else 1.0
        return {expert: form.scale * scores[expert] / total for expert in best}

    def _normed(self, part: str, x_TH: Tensor, layer: int = 0) -> Tensor:
        normed: Tensor = x_TH * (x_TH.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self._of(part, layer)
        return normed

    def _attention(self, layer: int, x_TH: Tensor, seen_TT: Tensor) -> Tensor:
        def heads(part: str, count: int) -> Tensor:
            if "qkv" in self.layout.names:
                sizes = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
                weight = torch.split(self._of("qkv", layer), sizes)["qkv".index(part)]
            else:
                weight = self._of(part, layer)
            bias = self._of(part, layer, "bias") if self.layout.bias else 0
            return (x_TH @ weight.T + bias).view(len(x_TH), count, DIM).transpose(0, 1)

        queries, keys, values = heads("q", HEADS), heads("k", KV_HEADS), heads("v", KV_HEADS)
        if self.layout.qk_norm:
            queries, keys = self._normed("q_norm", queries, layer), self._normed("k_norm", keys, layer)
        queries, keys = (_turned(each, self.layout.rotated) for each in (queries, keys))
        keys, values = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (keys, values))
        scores = (queries @ keys.mT * DIM**-0.5).masked_fill(~seen_TT, -torch.inf)
        mixed_TH = (scores.softmax(-1) @ values).transpose(0, 1).reshape(len(x_TH), -1)
        out_TH: Tensor = mixed_TH @ self._of("o", layer).T
        return out_TH


def _turned(heads_ATD: Tensor, rotated: int) -> Tensor:
    """Rotary positions: halves of the first ``rotated`` numbers of a head turn together."""
    length, half = heads_ATD.shape[1], rotated // 2
    angles = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    left, right, rest = torch.split(heads_ATD, [half, half, DIM - rotated], -1)
    turned = (left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin())
    return torch.cat((*turned, rest), -1)
