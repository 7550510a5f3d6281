"""Qwen2, with query, key and value biases; Qwen3, with query and key norms; and both with experts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from parlay.models.config import LONGEST_NGRAM, DecoderConfig, Experts, Json, LayerForm, NgramForm, NgramLayers, Shallow
from parlay.models.families.family import Family, GgufForm, windows_by_type, with_forms, with_layers

_OF_FILES = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


def _qwen(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    """Layers from ``max_window_layers`` on have a sliding window if it is switched on."""
    if not raw.get("use_sliding_window", False):
        return with_layers(config, usual, [None] * config.num_layers)
    slide = [layer >= raw.get("max_window_layers", 28) for layer in range(config.num_layers)]
    return with_layers(config, usual, windows_by_type(raw, config, raw.get("sliding_window", 4096), slide))


def _experts(raw: Json, *, count: int, chosen: int, size: int, shared: int) -> Experts:
    return Experts(
        count=int(raw.get("num_experts", raw.get("num_local_experts", count))),
        chosen=int(raw.get("num_experts_per_tok", chosen)),
        size=int(raw.get("moe_intermediate_size", size)),
        normalized=bool(raw.get("norm_topk_prob", False)),
        shared=shared,
        shared_gate=shared > 0,
    )


def _sparse(raw: Json, config: DecoderConfig, usual: LayerForm, experts: Experts) -> list[LayerForm]:
    """Layer forms with experts, except those that config.json says are dense."""
    dense, step = raw.get("mlp_only_layers") or [], int(raw.get("decoder_sparse_step", 1))
    return [
        usual if layer in dense or (layer + 1) % step else replace(usual, experts=experts)
        for layer in range(config.num_layers)
    ]


def _qwen2_moe(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    shared = int(raw.get("shared_expert_intermediate_size", 5632))
    experts = _experts(raw, count=60, chosen=4, size=1408, shared=shared)
    slides, least = raw.get("use_sliding_window", False), raw.get("max_window_layers", 28)
    usual_windows = [slides and layer % 2 == 0 and layer < least for layer in range(config.num_layers)]
    window = raw.get("sliding_window", 4096) if slides else None
    windows = windows_by_type(raw, config, window, usual_windows)
    forms = _sparse(raw, config, replace(usual, qkv_bias=bool(raw.get("qkv_bias", True))), experts)
    return with_forms(config, [replace(form, window=size) for form, size in zip(forms, windows, strict=True)])


def _qwen3_moe(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    experts = _experts(raw, count=128, chosen=8, size=768, shared=0)
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    return with_forms(config, _sparse(raw, config, replace(usual, window=window), experts))


def _normalized(raw: Json, config: DecoderConfig, tensors: Collection[str]) -> Json:
    """Add that expert weights are normalized, as in every Qwen3-MoE; its files leave that out."""
    return {**raw, "norm_topk_prob": True}


def _scone(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    ngrams = raw["ngrams"]
    form = NgramForm(int(ngrams["longest"]), int(ngrams["count"]), str(ngrams["fingerprint"]))
    if not 2 <= form.longest <= LONGEST_NGRAM or form.count < 1:
        raise ValueError(
            f"ngrams has {form.count} n-grams of up to {form.longest} tokens: 1 or more, of 2 to {LONGEST_NGRAM} each"
        )
    return replace(_qwen(raw, config, usual), ngrams=form)


def _ngram_layers(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    """After layers with sliding windows a row depends on its own token and, per layer, on ``window`` - 1 tokens
    before."""
    config, layers = _qwen(raw, config, usual), int(raw["ngram_layers"])
    if not 1 <= layers < config.num_layers:
        raise ValueError(f"ngram_layers {layers} of {config.num_layers} layers: at least 1, and fewer than there are")
    windows = [form.window or config.max_context for form in config.forms[:layers]]
    tokens = 1 + sum(window - 1 for window in windows)
    if not 2 <= tokens <= LONGEST_NGRAM:
        raise ValueError(f"its first {layers} layers see {tokens} tokens: 2 to {LONGEST_NGRAM} can be looked up")
    return replace(config, ngram_layers=NgramLayers(layers, tokens))


def _deep_shallow(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    config = _qwen(raw, config, usual)
    shallow = Shallow(int(raw["answer_layers"]), int(raw["answer_after"]))
    if not 1 <= shallow.layers < config.num_layers:
        raise ValueError(
            f"answer_layers {shallow.layers} of {config.num_layers} layers: at least 1, and fewer than there are"
        )
    if not 0 <= shallow.after < config.vocab_size:
        raise ValueError(f"answer_after {shallow.after} is not in the vocabulary of {config.vocab_size}")
    return replace(config, shallow=shallow)


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    models="Qwen 1.5 to 2.5, and R1 distilled into them",
    max_context=32_768,
    qkv_bias=True,
    complete=_qwen,
    gguf=GgufForm("qwen2"),
)
QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    models="Qwen3",
    max_context=32_768,
    head_dim=128,
    qk_norm=True,
    complete=_qwen,
    gguf=GgufForm("qwen3"),
)
QWEN2_MOE = replace(
    QWEN2,
    architecture="Qwen2MoeForCausalLM",
    models="Qwen 1.5 and 2 with experts",
    complete=_qwen2_moe,
    keys=(
        "qkv_bias",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "shared_expert_intermediate_size",
        "mlp_only_layers",
        "decoder_sparse_step",
    ),
    gguf=GgufForm(
        "qwen2moe",
        keys={**_OF_FILES, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    ),
)
QWEN3_MOE = replace(
    QWEN3,
    architecture="Qwen3MoeForCausalLM",
    models="Qwen3 and Qwen3-Coder with experts",
    head_dim=None,
    complete=_qwen3_moe,
    keys=(
        *(key for key in QWEN2_MOE.keys if key not in ("qkv_bias", "shared_expert_intermediate_size")),
        "num_local_experts",
        "use_qk_norm",
    ),
    gguf=GgufForm("qwen3moe", keys=_OF_FILES, normalize=_normalized),
)
SCONE = replace(
    QWEN3,
    architecture="SconeForCausalLM",
    models="models of `parlay train scone`: Qwen3 with embeddings of n-grams",
    complete=_scone,
    keys=("ngrams",),
    gguf=None,
    note="one process; no GGUF file is written from it",
)
NGRAM_LAYERS = replace(
    QWEN3,
    architecture="NgramLayersForCausalLM",
    models="models of `parlay train ngram-layers`: Qwen3 whose first layers see few tokens, and are looked up",
    complete=_ngram_layers,
    keys=("ngram_layers",),
    gguf=None,
    note="one process; inputs can't replace tokens; no adapters by request; no GGUF file is written from it",
)
DEEP_SHALLOW = replace(
    QWEN3,
    architecture="DeepShallowForCausalLM",
    models="translators of `parlay train`: Qwen3 whose answers run through its last layers alone",
    complete=_deep_shallow,
    keys=("answer_layers", "answer_after"),
    gguf=None,
    note="one process; inputs can't replace tokens; no GGUF file is written from it",
)
