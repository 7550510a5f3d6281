"""Llama's layer stands three times, in C, in torch's operators and with gradients for heads: one computation."""

from __future__ import annotations

import pytest
import torch

from parlay.compiled.library import SWITCH
from parlay.heads.layer import Block, Steps
from parlay.models.config import DecoderConfig, Experts, LayerForm, RopeConfig
from parlay.models.native import NativeRunner
from parlay.models.weights.shapes import weight_shapes
from parlay.types import Segment

LAYERS = 2
TEXT = tuple(7 * place % 31 for place in range(40))
CONFIGS = {
    "llama": {},
    "biases": {"qkv_bias": True},
    "norms of heads": {"qk_norm": True},
    "stretched positions": {"rope": RopeConfig(theta=500.0, kind="linear", factor=3.0)},
}


@pytest.mark.parametrize("form", CONFIGS)
def test_the_three_layers_compute_the_same(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DecoderConfig(
        architecture="LlamaForCausalLM", vocab_size=31, hidden_size=48, intermediate_size=80, num_layers=LAYERS + 1,
        num_heads=6, num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5, max_context=64, tie_embeddings=True,
        **CONFIGS[form],
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 1)
        for name, shape in weight_shapes(config).items()
    }
    expected = weights["model.embed_tokens.weight"][list(TEXT)][None]
    for layer in range(LAYERS):
        block, prefix = Block(config), f"model.layers.{layer}."
        own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        block.load_state_dict(own)
        expected = block(expected, Steps()).detach()
    for kernels in ("compiled", "torch"):
        if kernels == "torch":
            monkeypatch.setenv(SWITCH, "0")
        runner = NativeRunner(
            config, weights, dtype=torch.float32, device=torch.device("cpu"), max_tokens_cached=64, name=kernels
        )
        runner.open(0, TEXT)
        assert runner.reserve(0, len(TEXT))
        found = runner.forward([Segment(0, TEXT)], taps=(LAYERS,)).taps[LAYERS]
        torch.testing.assert_close(found, expected[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("form", "numbers"),
    [
        (LayerForm(out_scale=True), 0),
        (LayerForm(out_scale=True), 16),
        (LayerForm(out_scale=True, experts=Experts(count=4, chosen=2, size=32)), 0),
    ],
    ids=["dense", "numbers of its own", "experts"],
)
def test_what_leaves_a_layer_is_scaled_though_it_norms_no_outputs(
    form: LayerForm, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DecoderConfig(
        architecture="LlamaForCausalLM", vocab_size=31, hidden_size=48, intermediate_size=80, num_layers=LAYERS,
        num_heads=6, num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5, max_context=64, tie_embeddings=True,
        layers=(form,) * LAYERS, per_layer_size=numbers,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5)
        if len(shape) > 1
        else torch.full(shape, 0.7)
        for name, shape in weight_shapes(config).items()
    }
    found = []
    for kernels in ("", "0"):
        monkeypatch.setenv(SWITCH, kernels)
        runner = NativeRunner(
            config, weights, dtype=torch.float32, device=torch.device("cpu"), max_tokens_cached=64, name=kernels
        )
        runner.open(0, TEXT)
        assert runner.reserve(0, len(TEXT))
        found.append(runner.forward([Segment(0, TEXT)]).logits_RV)
    torch.testing.assert_close(*found, atol=2e-5, rtol=1e-4)
