"""Gemma 1 to 3: scaled embeddings, norm weights that are offset by one, and from Gemma 2 on norms after attention and
feed-forward.

Gemma 2 caps scores and logits, and every second layer has a window. Gemma 3 norms queries and keys; five of six layers
have a window, and a rotary base of their own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from parlay.models.config import DecoderConfig, Json, LayerForm, RopeConfig
from parlay.models.families.family import (
    IMAGES,
    TEXT_PREFIXES,
    Family,
    GgufForm,
    all_but_every,
    rope_by_type,
    windows_by_type,
    with_forms,
    with_layers,
)

POST_NORMS = {
    "post_attention_layernorm": "attention_out_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp_out_layernorm",
}
_LARGEST = (46, 62)
"""Layer counts of the 27 B models of Gemma 2 and 3, whose score scale differs and is missing from GGUF files."""
_OF_FILES = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
}
_USUAL_TEXT = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""Defaults of Gemma 3's text_config."""


def _gemma(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    layered = with_layers(config, usual, [None] * config.num_layers)
    return replace(layered, embedding_scale=config.hidden_size**0.5)


def _sandwiched(raw: Json, usual: LayerForm, cap: float) -> LayerForm:
    scalar = float(raw.get("query_pre_attn_scalar", 256))
    if not scalar > 0:
        raise ValueError(f"query_pre_attn_scalar {scalar}: expected a number above 0")
    return replace(
        usual,
        post_norms=True,
        scale=scalar**-0.5,
        score_cap=float(raw.get("attn_logit_softcapping", cap) or 0),
    )


def _gemma2(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    slide = [layer % 2 == 0 for layer in range(config.num_layers)]
    windows = windows_by_type(raw, config, raw.get("sliding_window", 4096), slide)
    layered = with_layers(config, _sandwiched(raw, usual, 50.0), windows)
    logit_cap = float(raw.get("final_logit_softcapping", 30.0) or 0)
    return replace(layered, embedding_scale=config.hidden_size**0.5, logit_cap=logit_cap)


def _gemma3(raw: Json, config: DecoderConfig, usual: LayerForm) -> DecoderConfig:
    slide = all_but_every(int(raw.get("sliding_window_pattern", 6)), config.num_layers)
    windows = windows_by_type(raw, config, raw.get("sliding_window", 4096), slide)
    form = _sandwiched(raw, usual, 0.0)
    sliding = replace(form, rope=RopeConfig(theta=float(raw.get("rope_local_base_freq") or 10_000.0)))
    layered = with_forms(config, [form if window is None else replace(sliding, window=window) for window in windows])
    logit_cap = float(raw.get("final_logit_softcapping") or 0)
    return replace(layered, embedding_scale=config.hidden_size**0.5, logit_cap=logit_cap)


def _scale_of_files(raw: Json, config: DecoderConfig, tensors: Collection[str]) -> Json:
    """Add the score scale, which depends on the number of layers in GGUF files; without a window no layer slides."""
    largest = config.num_layers in _LARGEST
    divided = config.hidden_size // config.num_heads if largest else config.head_dim
    return {"sliding_window": None, **raw, "query_pre_attn_scalar": divided}


def _text(raw: Json) -> Json:
    """The text model's part of config.json."""
    declared = {"torch_dtype": raw.get("torch_dtype"), **raw.get("text_config", {})}
    return rope_by_type({**_USUAL_TEXT, **declared})


GEMMA = Family(
    architecture="GemmaForCausalLM",
    models="Gemma 1, CodeGemma",
    max_context=8192,
    head_dim=256,
    tie_embeddings=True,
    activation="gelu_pytorch_tanh",
    complete=_gemma,
    norm_offset=1.0,
    gguf=GgufForm("gemma"),
)
GEMMA2 = replace(
    GEMMA,
    architecture="Gemma2ForCausalLM",
    models="Gemma 2",
    complete=_gemma2,
    keys=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "sliding_window_size"),
    names=POST_NORMS,
    gguf=GgufForm("gemma2", keys=_OF_FILES, normalize=_scale_of_files),
)
GEMMA3 = replace(
    GEMMA2,
    architecture="Gemma3ForCausalLM",
    models="Gemma 3 270M and 1B",
    max_context=131_072,
    qk_norm=True,
    rope_theta=1_000_000.0,
    complete=_gemma3,
    normalize=rope_by_type,
    keys=(*GEMMA2.keys, "rope_local_base_freq", "sliding_window_pattern"),
    gguf=GgufForm(
        "gemma3", keys={**_OF_FILES, "rope.freq_base_swa": "rope_local_base_freq"}, normalize=_scale_of_files
    ),
)
GEMMA3_IMAGES = replace(
    GEMMA3,
    architecture="Gemma3ForConditionalGeneration",
    models="Gemma 3 4B to 27B",
    normalize=_text,
    prefixes=TEXT_PREFIXES,
    left_out=IMAGES,
    gguf=None,
    note="text only; in GGUF files it is gemma3",
)
