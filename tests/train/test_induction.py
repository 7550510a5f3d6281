"""The planted circuit copies before any training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from parlay.train.induction import Marks, plant
from parlay.train.objective import ANSWER_WEIGHT, START_WEIGHTS, make_loss, weights_of
from parlay.train.optimizers import Optimizers
from parlay.train.shapes import SHAPES, Shape

VOCABULARY = 1024
MARKS = Marks(rest=0, line=5, turns=(3, 2))


def repeated(length: int) -> Tensor:
    """The token with which texts begin, then random tokens, none of them the same, twice."""
    draw = torch.Generator().manual_seed(1)
    drawn = torch.stack([1 + torch.randperm(VOCABULARY - 1, generator=draw)[:length] for _ in range(2)])
    return torch.cat([torch.full((2, 1), MARKS.rest), drawn, drawn], dim=1)


@torch.inference_mode()
def share_copied(model: Qwen3ForCausalLM, ids: Tensor) -> float:
    """Share of tokens of the second showing that are predicted from the first."""
    second = ids.shape[1] // 2 + 1
    best = model(input_ids=ids).logits[:, second:-1].argmax(-1)
    return float((best == ids[:, second + 1 :]).float().mean())


@pytest.mark.parametrize(("name", "length"), [("mini", 50), ("mini", 300), ("mini-draft", 50)])
def test_random_tokens_are_copied_before_training(name: str, length: int) -> None:
    """At any distance: the comparison must not turn with position."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(SHAPES[name].config(VOCABULARY, 4)).eval()
    ids = repeated(length)
    assert share_copied(model, ids) < 0.1
    plant(model, MARKS)
    assert share_copied(model, ids) > 0.8


def test_a_text_that_does_not_repeat_is_left_alone() -> None:
    """Where nothing fits, the heads rest on the first token, and write next to nothing."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(SHAPES["mini"].config(VOCABULARY, 4)).eval()
    plant(model, MARKS)
    with torch.inference_mode():
        _, _, before, after, *_ = model(input_ids=repeated(200), output_hidden_states=True).hidden_states
    written = (after - before).norm(dim=-1)
    assert written[:, 30:200].median() < 0.2 * written[:, 230:].median()


def test_pinned_entries_stay_through_training() -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(SHAPES["tiny"].config(64, 4))
    pins = plant(model, MARKS)
    optimizers = Optimizers(model, pins)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    ids = torch.randint(64, (4, 32))
    loss = make_loss(model, None, (4, 3))
    for _ in range(3):
        loss(ids, ids.roll(-1, 1)).backward()
        optimizers.mask_gradients()
        optimizers.step(1.0)
    moved = 0
    for name, parameter in model.named_parameters():
        pinned = pins.get(name, torch.zeros_like(parameter, dtype=torch.bool))
        assert torch.equal(parameter[pinned], before[name][pinned]), name
        moved += int((parameter != before[name]).sum())
    assert moved > 1000


def test_answers_count_more_and_most_where_they_begin() -> None:
    end, begin, starts, rest = 4, 3, list(START_WEIGHTS), ANSWER_WEIGHT
    ids = torch.tensor([[7, begin, *[8] * (len(starts) + 1), end, 9], [7, begin, 8, end, begin, *[8] * len(starts)]])
    expected = [[1, *starts, rest, rest, 1, 1], [1, *starts[:2], 1, *starts, rest]]
    assert weights_of(ids, (end, begin)).tolist() == expected


def test_a_shape_without_room_for_the_circuit_is_refused() -> None:
    shape = Shape(hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn=32)
    with pytest.raises(ValueError, match="two layers"):
        plant(Qwen3ForCausalLM(shape.config(VOCABULARY, 4)), MARKS)
