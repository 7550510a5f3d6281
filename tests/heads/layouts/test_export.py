"""`parlay export` writes what opens again as the same head, or nothing; `parlay drafters add` keeps published heads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parlay.drafters.heads.proving import ProvedHeads
from parlay.heads import artefact
from parlay.heads.artefact import HeadArtefact, Origin, as_stored
from parlay.heads.base import SeveralHeadsConfig, draft_ids
from parlay.heads.layouts import writing
from parlay.heads.layouts.layout import LM_HEAD
from parlay.heads.medusa import MedusaHeads
from parlay.heads.mtp import NORMED
from parlay.models.config import DecoderConfig
from parlay.testing.checkpoints import save_random
from parlay.testing.random_heads import random_heads
from parlay.train.recipes.target import Target
from tests.cli.conftest import Cli, cli
from tests.heads.layouts import published
from tests.heads.layouts.conftest import Drafts, spec_of

__all__ = ["cli"]

Trained = Callable[[str], Path]
FORMATS = {"eagle3": "speculators", "block-drafter": "speculators", "medusa": "vllm"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def made(method: str, model: Path) -> HeadArtefact:
    """A head as `parlay train` saves it."""
    opened, target = random_heads(spec_of(model))(method, ""), Target.named(str(model))
    assert opened is not None
    witness_WH = target.embedding_VH[artefact.witness_ids(target.config.vocab_size)]
    held = opened.artefact
    return replace(held, witness_WH=witness_WH, origin=Origin("someone/toy", licence="apache-2.0"))


@pytest.fixture
def trained(model: Path, tmp_path: Path) -> Trained:
    def save(method: str) -> Path:
        artefact.save(tmp_path / method, made(method, model), "# A toy\n")
        return tmp_path / method

    return save


@pytest.fixture
def exported(cli: Cli, trained: Trained, model: Path, tmp_path: Path) -> Trained:
    """The folder of a trained head in the format that it has a place in."""

    def export(method: str) -> Path:
        words = ("--format", FORMATS[method], "--model", str(model), "--verifier", "someone/toy")
        result = cli("export", str(trained(method)), str(tmp_path / "deep" / "out"), *words)
        assert result.out == f"wrote {tmp_path / 'deep' / 'out'}: {method} for someone/toy\n"
        return tmp_path / "deep" / "out"

    return export


@pytest.mark.parametrize("method", sorted(FORMATS))
def test_what_is_exported_opens_again(method: str, exported: Trained, drafts: Drafts) -> None:
    out = exported(method)
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert (out / "README.md").read_text().startswith("# A toy\n")
    drafts(method, out)


@pytest.mark.parametrize("method", ["eagle3", "block-drafter"])
def test_the_speculators_format_keeps_every_number(
    method: str, exported: Trained, find: ProvedHeads, tmp_path: Path
) -> None:
    after = find(method, str(exported(method)))
    before = artefact.load(tmp_path / method)
    assert after is not None
    assert before.tensors.keys() == after.artefact.tensors.keys()
    assert all(after.artefact.tensors[name].equal(each) for name, each in before.tensors.items())
    assert all(after.artefact.settings[name] == value for name, value in before.settings.items())


def test_a_head_without_an_lm_head_is_exported_with_the_targets(
    cli: Cli, model: Path, target: Target, find: ProvedHeads, tmp_path: Path
) -> None:
    head = made("eagle3", model)
    tensors = {name: each for name, each in head.tensors.items() if name != LM_HEAD}
    artefact.save(tmp_path / "head", replace(head, tensors=tensors), "")
    cli("export", str(tmp_path / "head"), str(tmp_path / "out"), "--format", "speculators", "--model", str(model))
    found = find("eagle3", str(tmp_path / "out"))
    assert found is not None
    assert found.artefact.tensors[LM_HEAD].equal(target.head_VH[draft_ids(tensors["d2t"])])


def test_medusas_best_token_is_the_same_over_the_whole_vocabulary(
    exported: Trained, find: ProvedHeads, tmp_path: Path
) -> None:
    """vLLM takes no smaller one."""
    found = find("medusa", str(exported("medusa")))
    assert found is not None
    before, after = loaded(artefact.load(tmp_path / "medusa")), loaded(found.artefact)
    states = torch.randn(64, before.config.hidden_size)
    small, whole = before(states), after(states)
    torch.testing.assert_close(small, whole[..., before.draft_ids])
    assert whole.argmax(-1).equal(before.draft_ids[small.argmax(-1)])


def loaded(held: HeadArtefact) -> MedusaHeads:
    heads = MedusaHeads(SeveralHeadsConfig.of(held))
    heads.load_state_dict(dict(held.tensors))
    return heads.float().requires_grad_(False)


def test_modules_of_multi_token_prediction_need_layers_like_qwen3s(
    cli: Cli, model: Path, find: ProvedHeads, tmp_path: Path, target: Target
) -> None:
    head = made("mtp", model)
    head = replace(head, settings={**head.settings, NORMED: True})
    artefact.save(tmp_path / "plain", head, "")
    words = ("--format", "speculators", "--model", str(model))
    assert "layers like Qwen3's" in cli("export", str(tmp_path / "plain"), str(tmp_path / "out"), *words).err

    dim = head.layer.head_dim
    norms = {f"block.self_attn.{part}_norm.weight": torch.ones(dim) for part in "qk"}
    layer = replace(head.layer, qk_norm=True, num_layers=target.config.num_layers)
    artefact.save(tmp_path / "qwen3", replace(head, layer=layer, tensors={**head.tensors, **norms}), "")
    assert cli("export", str(tmp_path / "qwen3"), str(tmp_path / "out"), *words).code == 0
    found = find("mtp", str(tmp_path / "out"))
    assert found is not None
    stored = as_stored(replace(head, tensors={**head.tensors, **norms})).tensors
    kept = stored.keys() - {"d2t", "t2d", LM_HEAD}
    assert all(found.artefact.tensors[name].equal(stored[name]) for name in kept)


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (
            ("medusa", "speculators"),
            "is for eagle3, block-drafter, mtp, and this is a head for medusa: write --format vllm",
        ),
        (("hydra", "vllm"), "--format vllm is for medusa, and this is a head for hydra: no format holds"),
        (("mtp", "speculators"), "train it again with parlay train mtp"),
    ],
)
def test_what_a_format_can_not_hold_is_refused(
    case: tuple[str, str], told: str, cli: Cli, trained: Trained, tmp_path: Path
) -> None:
    method, layout = case
    result = cli("export", str(trained(method)), str(tmp_path / "out"), "--format", layout)
    assert told in result.err
    assert result.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_head_is_exported_for_no_other_target(cli: Cli, trained: Trained, tmp_path: Path) -> None:
    save_random("llama", tmp_path / "other", seed=1)
    words = ("--format", "vllm", "--model", str(tmp_path / "other"))
    result = cli("export", str(trained("medusa")), str(tmp_path / "out"), *words)
    assert result.code == 1
    assert "was trained for another model" in result.err.splitlines()[-1]
    assert not (tmp_path / "out").exists()
    words = ("--format", "vllm", "--model", "parlay-mini")
    assert "was trained for a target of" in cli("export", str(trained("medusa")), str(tmp_path / "out"), *words).err


def test_a_folder_with_files_is_left_alone_and_an_empty_one_is_taken(
    cli: Cli, trained: Trained, model: Path, tmp_path: Path
) -> None:
    folder, out = trained("medusa"), tmp_path / "out"
    words = ("--format", "vllm", "--model", str(model))
    assert "is there already: name a folder that is empty" in cli("export", str(folder), str(folder), *words).err
    out.mkdir()
    assert cli("export", str(folder), str(out), *words).code == 0


def test_a_disk_that_is_full_leaves_nothing(
    cli: Cli, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*said: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "save_file", full)
    result = cli("export", str(trained("medusa")), str(tmp_path / "deep" / "out"), "--format", "vllm")
    assert "No space left on device" in result.err
    assert not list((tmp_path / "deep").iterdir())


def test_a_published_head_is_added_as_one_of_ones_own(
    cli: Cli, config: DecoderConfig, model: Path, drafts: Drafts, tmp_path: Path
) -> None:
    folder = published.write(tmp_path / "theirs", *published.eagle3(config))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Theirs\n")
    assert "does not name its target model: add it, as in --model" in cli("drafters", "add", str(folder)).err
    result = cli("drafters", "add", str(folder), "--model", str(model), "--name", "theirs")
    assert "Nothing in" in result.out
    assert "added theirs" in result.out
    (row,) = [row for row in json.loads(cli("drafters", "list", "--json").out) if not row["shipped"]]
    assert (row["method"], row["licence"], row["target"]) == ("eagle3", "mit", model.name)
    drafts("eagle3", Path("theirs"))
