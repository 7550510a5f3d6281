"""Adapters that the package PEFT writes, by its own forward: read here they give its logits. Skipped without it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from parlay.models.loading import load_weights, read_config
from parlay.models.lora import merged
from parlay.models.native import NativeRunner
from parlay.testing.checkpoints import VOCAB_SIZE, save_random
from parlay.types import Segment

peft = pytest.importorskip("peft")

_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dense": ("qwen2", {"target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"down_proj": 7}}),
    "fused": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"], "alpha_pattern": {"qkv_proj": 3}}),
    "gates": ("gemma4-e", {"target_modules": [*_ATTENTION, "gate_proj", "down_proj"]}),
    "experts": ("qwen3-moe", {"target_modules": _ATTENTION, "target_parameters": _EXPERTS}),
    "shared expert": ("qwen2-moe", {"target_modules": ["down_proj"], "target_parameters": _EXPERTS}),
    "experts of Mixtral": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": _EXPERTS}),
    "inputs first": ("gpt-oss", {"target_modules": [], "target_parameters": _EXPERTS}),
}
IDS = tuple(7 * place % (VOCAB_SIZE - 5) + 3 for place in range(40))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(case: str, tmp_path: Path) -> None:
    """Beside the base and merged into it."""
    name, said = CASES[case]
    model = save_random(name, tmp_path / "base")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **said)).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter, value in wrapped.named_parameters():
        if "lora_" in parameter:
            value.data = torch.randn(value.shape, generator=generator) * 0.2
    wrapped.save_pretrained(tmp_path / "one")
    with torch.no_grad():
        expected = wrapped(input_ids=torch.tensor([IDS])).logits[0]
    config = read_config(tmp_path / "base")
    weights = load_weights(tmp_path / "base", config)
    base = _runner(config, weights)
    adapter = base.read_adapter(tmp_path / "one", "one")
    plain, beside = (_logits(base, each) for each in (None, adapter))
    assert (plain - expected).abs().max() > 0.02 * expected.abs().max()
    for found in (beside, _logits(_runner(config, merged(weights, adapter)), None)):
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def _runner(config: Any, weights: Any) -> NativeRunner:
    return NativeRunner(
        config, weights, dtype=torch.float32, device=torch.device("cpu"), max_tokens_cached=256, name="toy"
    )


def _logits(runner: NativeRunner, adapter: Any) -> torch.Tensor:
    runner.open(0, (), salt=str(adapter))
    assert runner.reserve(0, len(IDS))
    found = runner.forward([Segment(0, IDS, adapter=adapter)]).logits_RV
    runner.release(0)
    return found
