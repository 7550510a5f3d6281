"""The planted circuit copies before any training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from parlay.train.induction import plant
from parlay.train.shapes import SHAPES, Shape

VOCABULARY = 1024


def repeated(length: int) -> Tensor:
    """Random tokens, none of them the same, twice."""
    draw = torch.Generator().manual_seed(1)
    drawn = torch.stack([torch.randperm(VOCABULARY, generator=draw)[:length] for _ in range(2)])
    return torch.cat([drawn, drawn], dim=1)


@torch.inference_mode()
def share_copied(model: Qwen3ForCausalLM, ids: Tensor) -> float:
    """Share of tokens of the second showing that are predicted from the first."""
    half = ids.shape[1] // 2
    best = model(input_ids=ids).logits[:, half:-1].argmax(-1)
    return float((best == ids[:, half + 1 :]).float().mean())


@pytest.mark.parametrize(("name", "length"), [("mini", 50), ("mini", 300), ("mini-draft", 50)])
def test_random_tokens_are_copied_before_training(name: str, length: int) -> None:
    """At any distance: the comparison must not turn with position."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(SHAPES[name].config(VOCABULARY, 4)).eval()
    ids = repeated(length)
    assert share_copied(model, ids) < 0.1
    plant(model)
    assert share_copied(model, ids) > 0.8


def test_a_shape_without_room_for_the_circuit_is_refused() -> None:
    shape = Shape(hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn=32)
    with pytest.raises(ValueError, match="two layers"):
        plant(Qwen3ForCausalLM(shape.config(VOCABULARY, 4)))
