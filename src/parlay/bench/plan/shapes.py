"""Finds the shapes of models for the cost model, from checkpoints or from a table of well-known models."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from parlay.cost.roofline import LayerSums, MixedLayers, ModelShape
from parlay.models.config import DecoderConfig, UnsupportedModel
from parlay.models.fetch.pulled import WHEELS, place_of
from parlay.models.fetch.resolving import is_local, resolve_config
from parlay.models.weights.formats import Format

_Sizes = tuple[int, int, int, int, int, int, int, bool]
_QWEN25: Mapping[str, _Sizes] = {
    "0.5b": (896, 4864, 24, 14, 2, 64, 151_936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 128, 151_936, True),
    "3b": (2048, 11_008, 36, 16, 2, 128, 151_936, True),
    "7b": (3584, 18_944, 28, 28, 4, 128, 152_064, False),
    "14b": (5120, 13_824, 48, 40, 8, 128, 152_064, False),
    "32b": (5120, 27_648, 64, 40, 8, 128, 152_064, False),
    "72b": (8192, 29_568, 80, 64, 8, 128, 152_064, False),
}
KNOWN: Mapping[str, _Sizes] = {
    "smollm2-135m": (576, 1536, 30, 9, 3, 64, 49_152, True),
    "smollm2-360m": (960, 2560, 32, 15, 5, 64, 49_152, True),
    "smollm2-1.7b": (2048, 8192, 24, 32, 32, 64, 49_152, True),
    **{f"qwen2.5-{size}": sizes for size, sizes in _QWEN25.items()},
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151_936, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 128, 151_936, True),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, 151_936, True),
    "qwen3-8b": (4096, 12_288, 36, 32, 8, 128, 151_936, False),
    "qwen3-14b": (5120, 17_408, 40, 40, 8, 128, 151_936, False),
    "qwen3-32b": (5120, 25_600, 64, 64, 8, 128, 151_936, False),
    "llama-2-7b": (4096, 11_008, 32, 32, 32, 128, 32_000, False),
    "llama-2-13b": (5120, 13_824, 40, 40, 40, 128, 32_000, False),
    "llama-3-8b": (4096, 14_336, 32, 32, 8, 128, 128_256, False),
    "llama-3-70b": (8192, 28_672, 80, 64, 8, 128, 128_256, False),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 64, 128_256, True),
    "llama-3.2-3b": (3072, 8192, 28, 24, 8, 128, 128_256, True),
    "tinyllama-1.1b": (2048, 5632, 22, 32, 4, 64, 32_000, False),
    "mistral-7b": (4096, 14_336, 32, 32, 8, 128, 32_768, False),
    "phi-3-mini": (3072, 8192, 32, 32, 32, 96, 32_064, False),
}
"""Sizes of well-known models by name, from the makers' config.json: hidden size, MLP size, layers, heads, KV heads,
size of a head, vocabulary, and whether embedding and LM head are tied."""
_CONTEXTS = {
    "smollm2-": 8192,
    "qwen2.5-0.5b": 32_768,
    "qwen2.5-1.5b": 32_768,
    "qwen2.5-3b": 32_768,
    "qwen3-": 40_960,
    "llama-2-": 4096,
    "tinyllama-": 2048,
    "mistral-7b": 32_768,
}
"""The longest context in tokens by the beginning of a model's name, from the makers' config.json. If variants differ,
it is the longest one. All other models have `_LONGEST`."""
_LONGEST = 1 << 17
_ALIASES = {"llama-3.1-8b": "llama-3-8b", "llama-3.1-70b": "llama-3-70b", "llama-3.3-70b": "llama-3-70b"}
_MAKER = re.compile(r"^meta-")
_VARIANT = re.compile(r"-(instruct|chat|base|hf|it|coder|math|v0\.\d|v1\.\d|\d{4}|4k|128k|gguf)(?=-|$)")


def known_shape(model: str) -> _Sizes | None:
    """Return the sizes of a model in `KNOWN`, by its name there or on the Hub; None for any other model.

    None also for a model whose file is on this machine, because the file tells more.
    """
    if is_local(model) and not _to_be_pulled(model):
        return None
    return KNOWN.get(_plain_name(model))


def _to_be_pulled(model: str) -> bool:
    return model in WHEELS and not place_of(model).is_file()


def _plain_name(model: str) -> str:
    name = _VARIANT.sub("", _MAKER.sub("", model.rpartition("/")[2].lower()))
    return _ALIASES.get(name, name)


def known_name(model: str) -> bool:
    """Whether the model is in `KNOWN`, so that its name tells its shape."""
    return known_shape(model) is not None


def stores_twice(model: str) -> bool:
    """Whether a GGUF file stores a tied embedding twice: it is one matrix of the model, but two in memory."""
    if known_name(model):
        return False
    from parlay.models.facts import ties_embeddings  # here, as it imports torch

    return ties_embeddings(resolve_config(model))


def read_model(model: str) -> DecoderConfig:
    """Return the config of the decoder that a name in `KNOWN`, a built-in name, a folder or a Hub id stands for.

    A folder needs only its config.json. A GGUF file that stores a tied embedding twice counts as tied. Raises
    ParlayError (UnsupportedModel) for models that Parlay's own decoder can't run.
    """
    sizes = known_shape(model)
    if sizes is None:
        from parlay.models.facts import ties_embeddings  # here, as these import torch
        from parlay.models.loading import read_config

        path = resolve_config(model)
        config = read_config(path)
        return replace(config, tie_embeddings=config.tie_embeddings or ties_embeddings(path))
    hidden, mlp, layers, heads, kv_heads, head_dim, vocabulary, tied = sizes
    shape = ModelShape(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        tie_embeddings=tied,
    )
    name = _plain_name(model)
    return config_of(
        shape, max_context=next((most for start, most in _CONTEXTS.items() if name.startswith(start)), _LONGEST)
    )


CACHED_BYTES = {"float32": 4.0, "bfloat16": 2.0, "q8_0": Format.Q8_0.block_bytes / Format.Q8_0.block}
"""Bytes of one number of a cached key or value, by the type of the cache."""


def shape_of(config: DecoderConfig, *, weight_bytes: float, kv_bytes: float, experts: bool = False) -> ModelShape:
    """Return a decoder's sizes for the cost model, with the bytes of a weight and of one number in the KV cache.

    The cost of a mixture of experts depends on which experts rows choose. So it raises UnsupportedModel for mixtures
    unless ``experts`` allows them, and for models whose layers have different mixtures.
    """
    mixed = {form.experts for form in config.forms if form.experts is not None}
    if mixed and (not experts or len(mixed) > 1):
        raise UnsupportedModel(
            f"{config.architecture}: the cost of this mixture of experts can't be predicted, because it depends on "
            "the experts that rows choose: measure it with parlay bench --forwards"
        )
    recent_layers, recent_tokens = _recent(config)
    return ModelShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        tie_embeddings=config.tie_embeddings,
        recent_layers=recent_layers,
        recent_tokens=recent_tokens,
        sums=_sums(config) if config.is_uneven or mixed else None,
        mixed=_mixed(config) if mixed else None,
    )


def _mixed(config: DecoderConfig) -> MixedLayers:
    """Return the mixture of experts that all layers with experts have."""
    found = [form.experts for form in config.forms if form.experts is not None]
    weights = 3 * config.hidden_size * found[0].size
    return MixedLayers(layers=len(found), count=found[0].count, chosen=found[0].chosen, weights=weights)


def _sums(config: DecoderConfig) -> LayerSums:
    """Return the sums of the sizes of layers that differ."""
    from parlay.models.forward import LayerPages  # here, as it imports torch
    from parlay.models.weights.shapes import weight_shapes

    pages, matrices = LayerPages.of(config), dict[str, tuple[int, int, int]]()
    for name, shape in weight_shapes(config).items():
        if len(shape) == 2 and ".experts." not in name:
            kind = name.split(".")[-2]
            rows, inputs, numbers = matrices.get(kind, (0, 0, 0))
            matrices[kind] = rows + shape[0], inputs + shape[1], numbers + shape[0] * shape[1]
    cached = [2 * len(pages.layers(kind)) * math.prod(pages.key_heads(config, kind)) for kind in (False, True)]
    own = ("per_layer_input_gate", "per_layer_projection", "per_layer_model_projection")
    return LayerSums(
        qkv=sum(matrices.get(f"{part}_proj", (0, 0, 0))[0] for part in "qkv"),
        mixed=matrices["o_proj"][1],
        mlp=matrices.get("down_proj", (0, 0, 0))[1],
        whole=cached[0],
        recent=cached[1],
        attended=sum(2 * math.prod(config.heads_of(form)) for form in config.forms),
        more=sum(matrices.get(name, (0, 0, 0))[2] for name in own),
        by_row=matrices.get("embed_tokens_per_layer", (0, 0, 0))[2],
    )


def _recent(config: DecoderConfig) -> tuple[int, int]:
    """Return the number of sliding-window layers, and how many tokens of a text they keep."""
    if not any(form.window for form in config.layers):
        return 0, 0
    from parlay.cache.pages import BLOCK  # here, as these import torch
    from parlay.cache.recent import most_pages
    from parlay.models.forward import LayerPages

    pages = LayerPages.of(config)
    return (sum(pages.recent), most_pages(pages.window) * BLOCK) if pages.window else (0, 0)


def config_of(shape: ModelShape, max_context: int) -> DecoderConfig:
    """Return the config of a Llama of this shape."""
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-6,
        max_context=max_context,
        tie_embeddings=shape.tie_embeddings,
    )
