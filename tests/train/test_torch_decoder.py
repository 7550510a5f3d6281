"""What recipes compute in torch is what the target computes: its states, whatever its positions, and its logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from parlay import models
from parlay.options import LoadOptions
from parlay.testing.checkpoints import save_random
from parlay.train.data.batches import padded
from parlay.train.data.features import Featured
from parlay.train.options import DistillTrainOptions
from parlay.train.recipes import distill
from parlay.train.recipes.recipe import Teacher
from parlay.train.recipes.target import Target
from parlay.train.recipes.torch_decoder import TorchModel
from parlay.types import Segment


@pytest.mark.parametrize("family", ["glm", "phi4-mini", "llama-yarn"])
def test_positions_that_turn_some_numbers_or_are_scaled_are_the_target_s(family: str, tmp_path: Path) -> None:
    save_random(family, tmp_path)
    target, ids = Target.named(str(tmp_path)), tuple(range(3, 27))
    runner = models.load(str(tmp_path), LoadOptions(dtype="float32", device="cpu"))
    runner.open(1, (), salt="text")
    assert runner.reserve(1, len(ids))
    last = target.config.num_layers
    decoder = TorchModel.of(target).model
    with torch.no_grad():
        found = decoder.step(decoder.embed_tokens(torch.tensor([ids])), decoder.begin(torch.tensor([0])))[0]
    expected = runner.forward([Segment(1, ids, logits_from=len(ids))], (last,)).taps[last]
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=1e-4)


def test_a_teacher_scales_and_caps_its_logits(model: Path) -> None:
    plain = Target.named(str(model))
    target = replace(plain, config=replace(plain.config, logit_scale=0.25, logit_cap=2.0))
    states_TF = torch.randn(5, target.config.hidden_size, generator=torch.Generator().manual_seed(0)) * 9
    batch, ids_D = padded([Featured(torch.arange(5), 1, states_TF)], 9), torch.arange(0, 40, 2)
    read = F.linear(states_TF, target.head_VH[ids_D].float())
    expected = (2 * (read / 8).tanh()).softmax(-1)
    torch.testing.assert_close(Teacher(target, ids_D).probs(batch)[0], expected)


def test_a_student_that_learns_further_stays_the_model_that_it_is(model: Path, tmp_path: Path) -> None:
    """A Llama with stretched positions, say, is no Llama with plain ones."""
    save_random("llama-llama3", tmp_path / "small")
    asked = DistillTrainOptions(model=str(model), student=str(tmp_path / "small"), work=tmp_path, out=tmp_path / "out")
    distill.start(asked, Target.named(str(model)), []).save(asked.out, "---\n---\n")
    assert Target.named(str(asked.out)).config.rope == Target.named(asked.student).config.rope
