"""One head module serves trainer and drafter: the native decoder that runs it gives the module's own numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from parlay.compiled.library import SWITCH
from parlay.heads.eagle3 import Eagle3Head
from parlay.heads.layer import Steps
from parlay.heads.native import eagle3_decoder
from parlay.models.native import NativeRunner
from parlay.testing.random_heads import random_eagle3
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import Features, Segment, Tree

VOCAB = 24


PLAIN, BIASED, QK_NORMED, NORMED = "plain", "biased", "qk-normed", "normed"


def made_as(form: str) -> Eagle3Head:
    """Layers like those of Llama, Qwen2 and Qwen3, and one that adds to its normed hidden states."""
    torch.manual_seed(0)
    plain = random_eagle3(ToyRunner(RandomLogits(VOCAB), VOCAB).spec)
    layer = replace(plain.config.layer, qkv_bias=form == BIASED, qk_norm=form == QK_NORMED)
    made = Eagle3Head(replace(plain.config, layer=layer, normed=form == NORMED))
    made.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(
                torch.randn(weight.shape) * (weight.shape[-1] ** -0.5 if weight.ndim == 2 else 0.2) + (weight.ndim == 1)
            )
    return made


@pytest.fixture
def head() -> Eagle3Head:
    return made_as(PLAIN)


def runner_of(head: Eagle3Head, embedding_VH: Tensor, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> NativeRunner:
    if not compiled:
        monkeypatch.setenv(SWITCH, "0")
    normed = head.config.normed
    config, weights = eagle3_decoder(
        head.config.layer, dict(head.state_dict()), embedding_VH, head.draft_ids, normed=normed
    )
    return NativeRunner(config, weights, dtype=torch.float32, device=torch.device("cpu"), max_tokens_cached=512)


@pytest.mark.parametrize("form", [PLAIN, BIASED, QK_NORMED, NORMED])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_native_decoder_gives_the_numbers_of_the_trained_module(
    form: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = made_as(form)
    norm = head.midlayer.hidden_norm if form == NORMED else nn.Identity()
    size = head.config.layer.hidden_size
    embedding_VH, features_TF = torch.randn(VOCAB, size), torch.randn(7, 2 * size)
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    with torch.no_grad():
        steps, hidden_TH, expected = Steps(), head.fuse(features_TF)[None], []
        for step in range(2):
            embedded_TH = embedding_VH[torch.tensor(ids[1 + step : 8 + step])][None]
            hidden_TH = head.step(hidden_TH, embedded_TH, steps)
            expected.append((hidden_TH[0], head.logits(hidden_TH[0])))
    runner = runner_of(head, embedding_VH, monkeypatch, compiled)
    runner.open(1, ids[1:8])
    assert runner.reserve(1, 16)
    with torch.no_grad():
        fused_TH = norm(head.fuse(features_TF))
    out = runner.forward([Segment(1, tuple(ids[1:8]), features=Features(fused_TH))], (1,))
    torch.testing.assert_close(out.taps[1], expected[0][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.logits_RV, expected[0][1], rtol=1e-4, atol=1e-4)

    level = Segment(1, tuple(ids[1:8]), Tree((ids[8],), (-1,)), 7, 7, Features(norm(out.taps[1][-1:]).detach()))
    after = runner.forward([level], (1,))
    torch.testing.assert_close(after.taps[1][0], expected[1][0][-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after.logits_RV[0], expected[1][1][-1], rtol=1e-4, atol=1e-4)


def test_without_an_lm_head_of_its_own_it_reads_the_embeddings_rows(head: Eagle3Head) -> None:
    embedding_VH = torch.randn(VOCAB, head.config.layer.hidden_size)
    tensors = {name: tensor for name, tensor in head.state_dict().items() if name != "lm_head.weight"}
    _, weights = eagle3_decoder(head.config.layer, tensors, embedding_VH, head.draft_ids)
    assert torch.equal(weights["lm_head.weight"], embedding_VH[head.draft_ids])  # type: ignore[arg-type]
