"""Diffusion models with the layers of Llama and Qwen: which rows their rows see, their mask tokens, and LLaDA's config.

Each checkpoint comes with Python code for its attention mask and for generating. None of that code runs here; these
records replace it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from parlay.models.config import DecoderConfig, Experts, Json, LayerForm, UnsupportedModel
from parlay.models.families.family import Family, GgufForm, with_forms
from parlay.models.families.glm import GROUPED, grouped_experts
from parlay.models.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from parlay.types import CanvasSpec, Ends
from parlay.types.model_forms import link_size


def _fills(family: Family, usual: CanvasSpec) -> Family:
    """The family with canvases as in ``usual``; config.json may name another mask token and another block size.

    Reading a config then raises ValueError for a mask outside the vocabulary and for a block size below 1.
    """

    def complete(raw: Json, config: DecoderConfig, form: LayerForm) -> DecoderConfig:
        config = family.complete(raw, config, form)
        if any(layer.window is not None for layer in config.forms):
            raise UnsupportedModel(f"{config.architecture}: sliding windows are not supported in diffusion models")
        names = ("block_size", "bd_size", "wedlm_window_size")
        block = next((raw[name] for name in names if raw.get(name) is not None), usual.block)
        mask = raw.get("mask_token_id")
        if mask is None and usual.mask_id < 0:
            raise ValueError("it has no mask_token_id: add the id that the tokenizer gives the mask")
        size, mask_id = int(block), int(usual.mask_id if mask is None else mask)
        if not 0 <= mask_id < config.vocab_size:
            raise ValueError(f"mask_token_id {mask_id} is not in the vocabulary of {config.vocab_size}")
        if size < 0 or (usual.block and not size):
            raise ValueError(f"block_size {size}: expected at least 1")
        text = usual.text if usual.text == "causal" else "block" if size else "full"
        return replace(config, canvas=usual._replace(mask_id=mask_id, block=size, text=text))

    return replace(family, complete=complete, canvas=usual)


SET_BLOCK_SIZE = "set_block_size"
"""The key of config.json by which a causal model declares that it also fills canvases, and of which size."""


def with_set_block(raw: Json, config: DecoderConfig) -> DecoderConfig:
    """The decoder with canvases after its causal text, if config.json has a ``set_block_size``.

    A place is predicted by the row before it, as in the text. Raises ValueError for a mask outside the vocabulary and
    for a size below 1.
    """
    if raw.get(SET_BLOCK_SIZE) is None or config.canvas is not None:
        return config
    size, mask_id = int(raw[SET_BLOCK_SIZE]), int(raw["mask_token_id"])
    if any(layer.window is not None for layer in config.forms):
        raise UnsupportedModel(f"{config.architecture}: sliding windows are not supported in models with canvases")
    if not 0 <= mask_id < config.vocab_size:
        raise ValueError(f"mask_token_id {mask_id} is not in the vocabulary of {config.vocab_size}")
    if size < 1:
        raise ValueError(f"{SET_BLOCK_SIZE} {size}: expected at least 1")
    return replace(config, canvas=CanvasSpec(mask_id, block=size, shift=True))


_LLADA_FIELDS: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("d_model",),
    "num_hidden_layers": ("n_layers",),
    "num_attention_heads": ("n_heads",),
    "num_key_value_heads": ("n_kv_heads",),
    "intermediate_size": ("mlp_hidden_size",),
    "vocab_size": ("embedding_size", "vocab_size"),
    "max_position_embeddings": ("max_sequence_length",),
    "tie_word_embeddings": ("weight_tying",),
    "hidden_act": ("activation_type",),
}
"""LLaDA's names of Llama's fields; the first one with a value counts."""

_LLADA_USUAL: Mapping[str, Any] = {
    "block_type": "llama",
    "block_group_size": 1,
    "layer_norm_type": "rms",
    "rope": True,
    "alibi": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "bias_for_layer_norm": False,
    "attention_layer_norm": False,
    "input_emb_norm": False,
    "scale_logits": False,
    "multi_query_attention": False,
}
"""LLaDA's options with the only values that the decoder computes."""


def _as_llama(raw: Json) -> Json:
    """LLaDA's config.json with Llama's names. Raises UnsupportedModel for an option that the decoder does not
    compute."""
    for name, usual in _LLADA_USUAL.items():
        if raw.get(name, usual) not in (usual, None):
            raise UnsupportedModel(f"LLaDAModelLM: {name} {raw[name]!r:.40} is not supported by the native decoder")
    declared = {
        ours: [raw[name] for name in names if raw.get(name) is not None] for ours, names in _LLADA_FIELDS.items()
    }
    return {**raw, **{ours: values[0] for ours, values in declared.items() if values}}


LLADA = _fills(
    Family(
        architecture="LLaDAModelLM",
        models="LLaDA, LLaDA 1.5",
        max_context=4096,
        normalize=_as_llama,
        prefixes={"model.transformer.blocks.": "model.layers."},
        names={
            "model.transformer.wte": "model.embed_tokens",
            "model.transformer.ln_f": "model.norm",
            "model.transformer.ff_out": "lm_head",
            ".attn_norm": ".input_layernorm",
            ".ff_norm": ".post_attention_layernorm",
            ".q_proj": ".self_attn.q_proj",
            ".k_proj": ".self_attn.k_proj",
            ".v_proj": ".self_attn.v_proj",
            ".attn_out": ".self_attn.o_proj",
            ".ff_proj": ".mlp.gate_proj",
            ".up_proj": ".mlp.up_proj",
            ".ff_out": ".mlp.down_proj",
        },
        gguf=GgufForm("llada", interleaved=True),
    ),
    CanvasSpec(126_336, text="full"),
)
"""LLaDA and LLaDA 1.5: all rows see each other, and each place is predicted by its own row."""
DREAM = _fills(
    replace(QWEN2, architecture="DreamModel", models="Dream", gguf=GgufForm("dream")),
    CanvasSpec(151_666, shift=True, text="full"),
)
"""Dream, adapted from Qwen2.5: all rows see each other, and each place is predicted by the row before it."""
FAST_DLLM = _fills(
    replace(QWEN2, architecture="Fast_dLLM_QwenForCausalLM", models="Fast-dLLM v2", gguf=None),
    CanvasSpec(151_665, block=32, shift=True, text="block"),
)
"""Fast-dLLM v2: Qwen2.5 in blocks of 32, where each place is predicted by the row before it."""
SDAR = _fills(
    replace(QWEN3, architecture="SDARForCausalLM", models="SDAR", gguf=None), CanvasSpec(151_669, block=4, text="block")
)
"""Qwen3 in blocks, mostly of 4."""
SDAR_MOE = _fills(
    replace(QWEN3_MOE, architecture="SDARMoeForCausalLM", models="SDAR with experts", gguf=None),
    CanvasSpec(151_669, block=4, text="block"),
)
"""Qwen3 with experts in blocks, mostly of 4."""


def _llada_moe(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    """Read LLaDA-MoE's experts. Raises UnsupportedModel for options that no published model of the family has."""
    if raw.get("moe_router_score_function", "softmax") != "softmax" or raw.get("moe_router_enable_expert_bias"):
        raise UnsupportedModel("LLaDAMoEModelLM: experts are chosen by softmax alone")
    experts = Experts(
        count=int(raw["num_experts"]),
        chosen=int(raw["num_experts_per_tok"]),
        size=int(raw["expert_intermediate_size"]),
        normalized=bool(raw.get("norm_topk_prob") or False),
        shared=int(raw.get("shared_expert_intermediate_size") or 0),
        scale=float(raw.get("routed_scaling_factor") or 1),
    )
    usual = replace(usual, qk_norm=bool(raw.get("qk_layernorm", True)))
    which = raw.get("moe_layer_freq") or [1]
    forms = [replace(usual, experts=experts) if which[i % len(which)] else usual for i in range(config.num_layers)]
    return with_forms(config, forms)


def _dense_size(raw: Json) -> Json:
    return {"intermediate_size": raw.get("dense_intermediate_size", raw.get("expert_intermediate_size")), **raw}


LLADA_MOE = _fills(
    Family(
        architecture="LLaDAMoEModelLM",
        models="LLaDA-MoE",
        max_context=8192,
        normalize=_dense_size,
        complete=_llada_moe,
        keys=(
            *("dense_intermediate_size", "expert_intermediate_size", "shared_expert_intermediate_size"),
            *("num_experts", "num_experts_per_tok", "moe_layer_freq", "moe_router_score_function", "qk_layernorm"),
            *("moe_router_enable_expert_bias", "norm_topk_prob", "routed_scaling_factor"),
        ),
    ),
    CanvasSpec(156_895, text="full"),
)
"""LLaDA-MoE: Qwen3's layers with experts whose weights are not normalized; all rows see each other."""


def _llada2(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    if not raw.get("use_qk_norm", True) or raw.get("use_bias") or raw.get("use_qkv_bias"):
        raise UnsupportedModel("LLaDA2MoeModelLM: queries and keys have norms, and no product has a bias")
    forms = grouped_experts(raw, replace(usual, qk_norm=True), config.num_layers, "num_experts", normalized=True)
    return with_forms(config, forms)


LLADA2 = _fills(
    Family(
        architecture="LLaDA2MoeModelLM",
        models="LLaDA 2",
        max_context=8192,
        rotated=0.5,
        complete=_llada2,
        keys=(*GROUPED, "num_experts", "num_shared_experts", "use_bias", "use_qkv_bias", "score_function"),
        names={
            "model.word_embeddings": "model.embed_tokens",
            ".attention.query_key_value": ".self_attn.qkv_proj",
            ".attention.query_layernorm": ".self_attn.q_norm",
            ".attention.key_layernorm": ".self_attn.k_norm",
            ".attention.dense": ".self_attn.o_proj",
            ".mlp.shared_experts.": ".mlp.shared_expert.",
            ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
        },
    ),
    CanvasSpec(156_895, block=32, text="block"),
)
"""LLaDA 2: experts chosen by sigmoids in groups, and blocks of 32."""


def _wedlm(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    """Qwen2.5's or Qwen3's layers, as config.json says."""
    biased = bool(raw.get("attention_bias", True))
    form = replace(usual, qkv_bias=biased, out_bias=False, qk_norm=bool(raw.get("qk_norm")))
    return QWEN2.complete(raw, replace(config, qkv_bias=form.qkv_bias, qk_norm=form.qk_norm), form)


WEDLM = _fills(
    replace(QWEN2, architecture="WeDLMForCausalLM", models="WeDLM", complete=_wedlm, keys=("qk_norm",), gguf=None),
    CanvasSpec(-1, block=16, ordered=True),
)
"""WeDLM: Qwen2.5 or Qwen3, causal on the canvas, too, where decided tokens are moved to the front. Each place is
predicted by its own row."""
A2D_QWEN3 = _fills(
    replace(QWEN3, architecture="A2DQwen3LMHeadModel", models="dLLM's Qwen3", gguf=None),
    CanvasSpec(151_669, text="full"),
)
"""dLLM's Qwen3: all rows see each other, or only those of a block if config.json has a ``block_size``."""


def _unscaled(raw: Json) -> Json:
    """Limit the context to positions at which queries are not scaled: the scale is 1 + beta * log(1 + floor(position /
    original)).

    Positions before ``original_max_position_embeddings`` are multiplied by 1.
    """
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    original = rope.get("original_max_position_embeddings")
    if not rope.get("llama_4_scaling_beta") or original is None:
        return raw
    return {**raw, "max_position_embeddings": min(raw.get("max_position_embeddings") or original, original)}


NEMOTRON = _fills(
    Family(
        architecture="NemotronLabsDiffusionModel",
        models="Nemotron-Labs-Diffusion",
        max_context=4096,
        normalize=_unscaled,
        prefixes={"encoder.": "model."},
        names={"diffusion_head": "lm_head"},
    ),
    CanvasSpec(100, block=32, whole=True),
)
"""Nemotron-Labs-Diffusion: its text is causal, so it can also decode autoregressively; rows of a canvas see each
other."""


ENDS: tuple[Literal["length", "fertilities", "frames", "graph"], ...] = ("length", "fertilities", "frames", "graph")
"""How an answer may end; see `parlay.types.Ends`."""


def _answers(raw: Json, config: DecoderConfig, form: LayerForm) -> DecoderConfig:
    """Read how models that `parlay train` made for translation fill a canvas with an answer. Raises ValueError for
    impossible ids."""
    config = QWEN3.complete(raw, config, form)
    declared = raw.get("canvas")
    if not isinstance(declared, Mapping) or declared.get("ends") not in ENDS:
        raise ValueError(f"config.json has no canvas that ends by {', '.join(ENDS[:-1])} or {ENDS[-1]}")
    if len(config.eos_ids) < 1:
        raise ValueError("config.json has no eos_token_id, which ends an answer")
    ends = Ends(
        declared["ends"],
        config.eos_ids[0],
        int(declared.get("first_number_id", 0)),
        int(declared.get("numbers", 0)),
        int(declared.get("scale", 1)),
        int(declared.get("blank_token_id", 0)),
        bool(declared.get("copies", False)),
        bool(declared.get("drafts", False)),
        int(declared.get("heads", 0)),
    )
    if declared.get("mask_token_id") is None:
        raise ValueError("the canvas of config.json has no mask_token_id")
    mask_id, size = int(declared["mask_token_id"]), config.vocab_size
    named = {"mask_token_id": mask_id, "blank_token_id": ends.blank_id, "first_number_id": ends.first_number}
    if wrong := [name for name, token in named.items() if not 0 <= token < size]:
        raise ValueError(f"{wrong[0]} {named[wrong[0]]} is not in the vocabulary of {size}")
    if ends.heads < 0 or (ends.heads and link_size(ends.numbers, ends.heads) < 2):
        raise ValueError(f"{ends.numbers} numbers are too few for {ends.heads} heads")
    if not 0 < ends.numbers <= size - ends.first_number or ends.scale < 1:
        raise ValueError(f"numbers {ends.numbers} and scale {ends.scale} do not fit a vocabulary of {size}")
    return replace(config, canvas=CanvasSpec(mask_id, ends=ends))


ANSWERS = replace(
    QWEN3,
    architecture="ParlayCanvasLM",
    models="translators of `parlay train`",
    complete=_answers,
    gguf=None,
    canvas=CanvasSpec(0),
)
"""Translators of `parlay train`: Qwen3's layers, a causal text, and one canvas that is the answer."""
DIFFUSION = (LLADA, DREAM, FAST_DLLM, SDAR, SDAR_MOE, LLADA_MOE, LLADA2, WEDLM, A2D_QWEN3, NEMOTRON, ANSWERS)

REFUSED: Mapping[str, str] = {
    "nemotron_labs_diffusion_vlm": "images are not supported",
}
"""Diffusion models that can't run here, by architecture or type, and the reason."""
