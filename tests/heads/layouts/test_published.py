"""Heads open as they are published: a strategy drafts with them, and they compute what the published code says."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.drafters.heads.proving import ProvedHeads
from parlay.heads.artefact import HeadArtefact
from parlay.heads.base import SeveralHeadsConfig, draft_ids
from parlay.heads.hydra import HydraHeads
from parlay.heads.layouts.layout import EMBEDDING, LAYOUT
from parlay.heads.medusa import MedusaHeads
from parlay.heads.mlp_speculator import MlpSpeculator
from parlay.models.config import DecoderConfig
from parlay.train.recipes.target import Target
from tests.heads.layouts import published
from tests.heads.layouts.conftest import Drafts

File = tuple[dict[str, Any], dict[str, Tensor]]
Case = tuple[str, str, Callable[[DecoderConfig], File]]
FILES: list[Case] = [
    ("eagle3", "EAGLE-3", published.eagle3),
    ("eagle3", "EAGLE-3", lambda target: published.eagle3(target, "layers.0.")),
    ("eagle", "EAGLE", published.eagle),
    ("eagle2", "EAGLE", published.eagle),
    ("eagle3", "speculators", published.speculators_eagle3),
    ("block-drafter", "speculators", published.peagle),
    ("mtp", "speculators", published.speculators_mtp),
    ("mtp", "DeepSeek MTP", published.deepseek_mtp),
    ("medusa", "Medusa", published.medusa),
    ("medusa", "Medusa", published.numbered_medusa),
    ("hydra", "Hydra", published.hydra),
    ("hydra", "Hydra", lambda target: published.hydra(target, layers=1)),
    ("mlp-speculator", "MLP speculator", published.mlp_speculator),
    ("mlp-speculator", "MLP speculator", lambda target: published.mlp_speculator(target, tied=True)),
    ("mlp-speculator", "MLP speculator", lambda target: published.mlp_speculator(target, scaled=False, steps=1)),
]


@pytest.mark.parametrize("case", FILES, ids=[f"{method}-{layout}" for method, layout, _ in FILES])
def test_a_strategy_drafts_with_it(
    case: Case, config: DecoderConfig, drafts: Drafts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    method, layout, file = case
    drafts(method, published.write(tmp_path, *file(config)))
    told = [record.getMessage() for record in caplog.records if "Nothing in it proves" in record.getMessage()]
    assert len(told) == 1
    assert f"in the layout of {layout}" in told[0]


Open = Callable[[str, File], HeadArtefact]


@pytest.fixture
def opened(find: ProvedHeads, tmp_path: Path) -> Open:
    """The artefact that a file becomes."""

    def open_(method: str, file: File) -> HeadArtefact:
        found = find(method, str(published.write(tmp_path, *file)))
        assert found is not None
        return found.artefact

    return open_


@pytest.mark.parametrize("file", [published.medusa, published.numbered_medusa])
def test_medusas_logits(file: Callable[[DecoderConfig], File], config: DecoderConfig, opened: Open) -> None:
    said, tensors = file(config)
    held = opened("medusa", (said, tensors))
    heads = MedusaHeads(SeveralHeadsConfig.of(held))
    heads.load_state_dict(dict(held.tensors))
    x, numbered = torch.randn(config.hidden_size), "0.1.weight" in tensors
    for head in range(2):
        weight = tensors[f"{head}.0.linear.weight" if numbered else f"blocks.{head}.layers.0.weight"]
        bias = tensors[f"{head}.0.linear.bias"] if numbered else 0
        mixed = x + F.silu(weight @ x + bias)
        expected = tensors[f"{head}.1.weight" if numbered else f"lm_heads.{head}.weight"] @ mixed
        torch.testing.assert_close(heads.head(head, x), expected)


@pytest.mark.parametrize("whole", [True, False])
def test_a_token_map_says_what_medusa_drafts(whole: bool, config: DecoderConfig, opened: Open) -> None:
    """Some files hold the rows of all tokens beside it."""
    said, tensors = published.medusa(config)
    tensors["token_map"] = torch.tensor([5, 3, 60])
    rows = tensors["lm_heads.1.weight"][tensors["token_map"]]
    if not whole:
        tensors |= {name: each[tensors["token_map"]] for name, each in tensors.items() if "lm_heads" in name}
    held = opened("medusa", ({**said, "truncated_vocab_size": 3}, tensors))
    assert draft_ids(held.tensors["d2t"]).tolist() == [5, 3, 60]
    assert held.tensors["lm_heads.1.weight"].equal(rows)


def test_medusas_heads_may_share_an_lm_head(config: DecoderConfig, opened: Open) -> None:
    said, tensors = published.medusa(config)
    shared = tensors.pop("lm_heads.0.weight")
    del tensors["lm_heads.1.weight"]
    held = opened("medusa", ({**said, "original_lm_head": True}, {**tensors, "lm_head.weight": shared}))
    assert held.tensors["lm_heads.1.weight"].equal(shared)


@pytest.mark.parametrize("layers", [1, 3])
def test_hydras_logits(layers: int, config: DecoderConfig, opened: Open) -> None:
    said, tensors = published.hydra(config, layers)
    held = opened("hydra", (said, tensors))
    heads = HydraHeads.of(held)
    heads.load_state_dict(dict(held.tensors))
    hidden, embedded = torch.randn(config.hidden_size), torch.randn(2, config.hidden_size)
    for head in range(2):
        x = torch.cat((hidden, embedded[: head + 1].flatten()))
        for layer in range(layers):
            at = f"hydra_mlp.{head}.{layer}."
            shortened = x if layer else tensors[at + "res_connection.weight"] @ x + tensors[at + "res_connection.bias"]
            x = shortened + F.silu(tensors[at + "linear.weight"] @ x + tensors[at + "linear.bias"])
        expected = tensors[f"hydra_lm_head.{head}.weight"] @ x + tensors[f"hydra_lm_head.{head}.bias"]
        torch.testing.assert_close(heads.heads[head](hidden, embedded[: head + 1].flatten()), expected)


@pytest.mark.parametrize(("tied", "scaled"), [(True, True), (False, True), (False, False)])
def test_the_mlp_speculators_logits(tied: bool, scaled: bool, config: DecoderConfig, opened: Open) -> None:
    said, tensors = published.mlp_speculator(config, tied=tied, scaled=scaled)
    held = opened("mlp-speculator", (said, tensors))
    module = MlpSpeculator.of(held)
    module.load_state_dict(dict(held.tensors))
    hidden, ids, inner = torch.randn(config.hidden_size), [5, 7, 60], said["inner_dim"]
    state, expected = module.begin(hidden), over_root_mean_square(hidden) / math.sqrt(2) if scaled else hidden
    kept = 0.5 ** (0.5 / 3)
    scale = math.sqrt((1 - kept**2) * inner / 2) / kept
    for step, token in enumerate(ids):
        own = 0 if tied else step
        emb, norm, head = (tensors[f"speculator.{part}.{own}.weight"] for part in ("emb", "ln", "head"))
        mix = tensors[f"speculator.proj.{min(step, 1) if tied else step}.weight"]
        mixed = over_root_mean_square(mix @ expected + scale * emb[token])
        expected = F.gelu(mixed * norm + tensors[f"speculator.ln.{own}.bias"])
        state = module.advance(step, state, torch.tensor(token))
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(module.read(step, state), head @ expected, rtol=1e-4, atol=1e-4)


def over_root_mean_square(x: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-6).sqrt()


def test_a_head_with_the_targets_embedding_is_proved_by_it(
    config: DecoderConfig, target: Target, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    said, tensors = published.eagle3(config)
    held = opened("eagle3", (said, {**tensors, EMBEDDING: target.embedding_VH}))
    assert held.settings[LAYOUT] == "EAGLE-3"
    assert not caplog.records


def test_a_head_reads_the_embedding_that_it_brings(
    config: DecoderConfig, find: ProvedHeads, drafts: Drafts, tmp_path: Path
) -> None:
    said, tensors = published.eagle3(config)
    own_VH = torch.randn(config.vocab_size, config.hidden_size)
    folder = published.write(tmp_path, said, {**tensors, EMBEDDING: own_VH})
    found = find("eagle3", str(folder))
    assert found is not None
    assert isinstance(found.embedding, Tensor)
    assert found.embedding.equal(own_VH)
    drafts("eagle3", folder)


def test_layers_are_counted_by_their_inputs_or_their_outputs(config: DecoderConfig, opened: Open) -> None:
    """The nested field says which layers' outputs are read, the other which layers' inputs."""
    said, tensors = published.eagle3(config)
    del said["eagle_aux_hidden_state_layer_ids"]
    tensors["fc.weight"] = published.matrix(config.hidden_size, 2 * config.hidden_size)
    nested = {**said, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1], "use_aux_hidden_state": True}}
    assert opened("eagle3", (nested, tensors)).settings["taps"] == [1, 2]
    flat = {**said, "eagle_aux_hidden_state_layer_ids": [0, 1]}
    assert opened("eagle3", (flat, tensors)).settings["taps"] == [0, 1]


def test_the_verifier_is_named(config: DecoderConfig, opened: Open) -> None:
    assert opened("eagle3", published.speculators_eagle3(config)).origin.target == "someone/toy"
