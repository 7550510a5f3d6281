"""What `parlay export` writes computes the same in the package `speculators`, and what that package saves opens here.

Skipped where the package is not installed; CONTRIBUTING.md says how to run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parlay.heads.artefact import HeadArtefact, as_stored
from parlay.heads.base import DraftVocab
from parlay.heads.block import BlockConfig, BlockHead
from parlay.heads.eagle3 import NORMED, Eagle3Config, Eagle3Head
from parlay.heads.layer import Steps
from parlay.heads.layouts.files import read
from parlay.heads.layouts.layout import EMBEDDING, NO_WITNESS
from parlay.heads.layouts.writing import Verifier, export
from parlay.heads.mtp import NORMED as MTP_NORMED
from parlay.heads.mtp import MtpModule
from parlay.models.config import DecoderConfig
from parlay.testing.checkpoints import save_random
from parlay.train.recipes.target import Target
from tests.heads.layouts.conftest import spec_of

package = pytest.importorskip("speculators", reason="the package speculators is not installed")
ROWS, DRAFT_VOCAB, TAPS = 6, 24, (0, 1, 2)


@pytest.fixture(params=["llama", "qwen3"])
def verifier(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_random(request.param, tmp_path / "verifier")
    return tmp_path / "verifier"


def disturbed(head: DraftVocab) -> dict[str, Tensor]:
    """Random numbers for all weights, as they are stored."""
    head.set_draft_vocab(torch.arange(len(head.d2t)) * (2 if len(head.d2t) < len(head.t2d) else 1))
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(torch.randn(weight.shape) * weight.shape[-1] ** -0.5 + (weight.ndim == 1))
            weight.copy_(weight.bfloat16())
    return dict(head.state_dict())


def written(head: HeadArtefact, verifier: Path, out: Path) -> Path:
    target = Target.named(str(verifier))
    named = Verifier(str(verifier), lambda: target.embedding_VH, lambda: target.head_VH)
    export(as_stored(head), "", "speculators", out, named)
    return out


def opened(folder: Path) -> Any:
    """The package's own model, which attends without compiling."""
    config = package.SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    return package.SpeculatorModel.from_pretrained(str(folder), config=config).float().eval()


def heard(module: nn.Module) -> list[Tensor]:
    """Fills with what the module gives."""
    found: list[Tensor] = []
    module.register_forward_hook(lambda _, inputs, output: found.append(output.detach()))
    return found


def back(folder: Path, model: Any, verifier: Path) -> Mapping[str, Tensor]:
    """The tensors that open here of what the package saves, but for those that are the verifier's."""
    model.save_pretrained(str(folder))
    found = dict(read(folder, spec_of(verifier)).tensors)
    assert torch.equal(found.pop(EMBEDDING), model.embed_tokens.weight) if EMBEDDING in found else True
    return found


def same(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    assert some.keys() == others.keys()
    for name, tensor in some.items():
        torch.testing.assert_close(tensor.float(), others[name].float(), rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("normed", [False, True])
@torch.no_grad()
def test_eagle3(normed: bool, verifier: Path, tmp_path: Path) -> None:
    layer, embedding_VH = config_of(verifier), embedding_of(verifier)
    head = Eagle3Head(Eagle3Config(layer, DRAFT_VOCAB, TAPS, normed))
    settings = {"taps": list(TAPS), "draft_vocab_size": DRAFT_VOCAB, NORMED: normed}
    made = HeadArtefact("eagle3", layer, settings, disturbed(head), NO_WITNESS)
    model = opened(written(made, verifier, tmp_path / "out"))

    features_TF, ids_T = torch.randn(ROWS, 3 * layer.hidden_size), torch.randint(layer.vocab_size, (ROWS,))
    theirs = heard(model.lm_head)
    model(features_TF[None], ids_T[None], torch.zeros(1, ROWS, dtype=torch.long), ttt_steps=3)
    steps, hidden_TH = Steps(), head.fuse(features_TF)[None]
    for step in range(3):
        ahead_T = torch.cat((ids_T[step:], torch.zeros(step, dtype=torch.long)))
        hidden_TH = head.step(hidden_TH, embedding_VH[ahead_T][None], steps)
        torch.testing.assert_close(head.logits(hidden_TH), theirs[step], rtol=1e-4, atol=1e-4)
    same(back(tmp_path / "back", model, verifier), head.state_dict())


@torch.no_grad()
def test_peagle(verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, embedding_VH, size = config_of(verifier), embedding_of(verifier), 3
    head = BlockHead(BlockConfig(layer, DRAFT_VOCAB, TAPS, 2, size, mask_id=63))
    sizes = {"layers": 2, "length": size, "mask_id": 63}
    settings = {"taps": list(TAPS), "draft_vocab_size": DRAFT_VOCAB, **sizes}
    made = HeadArtefact("block-drafter", layer, settings, disturbed(head), NO_WITNESS)
    model = opened(written(made, verifier, tmp_path / "out"))

    from speculators.models.peagle import core

    chosen: list[tuple[Tensor, Tensor]] = []
    draw = core.generate_cod_sample_indices
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **said: chosen.append(draw(**said)) or chosen[0])
    features_TF, ids_T = torch.randn(ROWS, 3 * layer.hidden_size), torch.randint(layer.vocab_size, (ROWS,))
    theirs = heard(model.lm_head)
    last_TH = torch.randn(1, ROWS, layer.hidden_size)
    from speculators.losses import resolve_loss_config

    documents = torch.zeros(1, ROWS, dtype=torch.long)
    config = resolve_loss_config("kl_div", "eager")
    said = {"num_depths": size, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
    model(features_TF[None], ids_T[None], documents, None, None, last_TH, config, **said)

    fused_TH, mask_H = head.fuse(features_TF)[None], embedding_VH[63]
    ours = [head.logits(each)[0] for each in head.unrolled(fused_TH, embedding_VH[ids_T][None], mask_H, None, ROWS)]
    anchors, depths = chosen[0]
    assert int(depths.max()) == size - 1
    rows = [row for row, anchor in enumerate(anchors.tolist()) if anchor >= 0]  # its sampler draws some before the text
    for row in rows:
        anchor, depth = int(anchors[row]), int(depths[row])
        torch.testing.assert_close(ours[depth][anchor], theirs[0][0, row], rtol=1e-4, atol=1e-4)
    same(back(tmp_path / "back", model, verifier), head.state_dict())


@torch.no_grad()
def test_mtp(tmp_path: Path) -> None:
    """Its layers are Qwen3's alone. What the first depth gives is what the next one reads."""
    save_random("qwen3", tmp_path / "verifier")
    verifier = tmp_path / "verifier"
    layer, embedding_VH = config_of(verifier), embedding_of(verifier)
    module = MtpModule(layer, layer.vocab_size, normed=True)
    settings = {"taps": [layer.num_layers], "draft_vocab_size": layer.vocab_size, MTP_NORMED: True}
    made = HeadArtefact("mtp", layer, settings, disturbed(module), NO_WITNESS)
    model = opened(written(made, verifier, tmp_path / "out"))

    states_TH, ids_T = torch.randn(ROWS, layer.hidden_size), torch.randint(layer.vocab_size, (ROWS + 1,))
    given = heard(model.mtp_layers[0])
    logits, *_ = model(ids_T[None], torch.cat((states_TH, states_TH[:1]))[None])
    rows = logits[0].shape[1]
    hidden_TH = module.step(states_TH[None, :rows], embedding_VH[ids_T[1 : rows + 1]][None], Steps())
    torch.testing.assert_close(module.again(hidden_TH), given[0], rtol=1e-4, atol=1e-4)
    head_VH = Target.named(str(verifier)).head_VH.float()
    torch.testing.assert_close(module.norm(hidden_TH) @ head_VH.T, logits[0], rtol=1e-4, atol=1e-4)
    same(back(tmp_path / "back", model, verifier), module.state_dict())


def config_of(model: Path) -> DecoderConfig:
    return Target.named(str(model)).config


def embedding_of(model: Path) -> Tensor:
    return Target.named(str(model)).embedding_VH.float()
