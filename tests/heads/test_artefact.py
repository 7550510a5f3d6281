"""A head's folder proves itself: damage is refused by name, and what computes otherwise than in training is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parlay import models
from parlay.bench.plan.heads import HEADS
from parlay.drafters.heads.modules import check_tensors
from parlay.drafters.options import EAGLE3, EARLY_EXIT, HEADS_OF_OTHERS, MEDUSA
from parlay.heads import artefact
from parlay.heads.artefact import CONFIG, WEIGHTS, BadHead, HeadArtefact, Origin
from parlay.heads.hub import front_matter, read_card
from parlay.heads.proof import LENGTH, Proof, agreement, target_states
from parlay.llm import LLM
from parlay.models.fetch.hub import hash_of
from parlay.models.weights.quantize import in_q8_0
from parlay.strategies.catalogue import catalogue
from parlay.testing.checkpoints import VOCAB_SIZE
from parlay.testing.random_heads import random_heads
from parlay.testing.toy_tokenizers import toy_tokenizer
from parlay.text.prompts import TokensPrompt
from parlay.train.heads import DISTILL, METHODS
from parlay.types import SamplingParams
from tests.heads.conftest import LOAD

Edit = Callable[[HeadArtefact, Proof], HeadArtefact]
Use = Callable[[Path], str]


@pytest.fixture
def use(model: Path, caplog: pytest.LogCaptureFixture) -> Use:
    """What is logged where a strategy drafts with the head of a folder; its text is plain decoding's."""

    def logged(folder: Path) -> str:
        prompt, greedy = TokensPrompt(prompt_token_ids=[3, 4]), SamplingParams(temperature=0, max_tokens=8)
        with LLM(str(model), tokenizer=toy_tokenizer(VOCAB_SIZE), dtype="float32", device="cpu") as llm:
            plain, drafted = (
                llm.generate([prompt], greedy, strategy=strategy)[0].outputs[0]
                for strategy in ("none", f"{EAGLE3}:head={folder},policy=fixed")
            )
        assert drafted.token_ids == plain.token_ids
        assert drafted.metrics.draft_tokens > 0
        return caplog.text

    return logged


def test_no_file_is_needed_once_a_head_is_loaded(head: HeadArtefact, tmp_path: Path) -> None:
    """A process that has a file mapped ends when somebody cuts it short, as saving the head again once did."""
    artefact.save(tmp_path, head, "")
    loaded, maps = artefact.load(tmp_path), Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("the system does not tell which files are mapped")
    assert str(tmp_path) not in maps.read_text()
    del loaded


def test_what_is_saved_is_loaded_and_drafts_without_a_warning(use: Use, head: HeadArtefact, tmp_path: Path) -> None:
    artefact.save(tmp_path, head, "")
    loaded, facts = artefact.load(tmp_path), artefact.read_facts(tmp_path)
    assert (loaded.method, loaded.origin, loaded.settings) == (EAGLE3, head.origin, head.settings)
    assert loaded.proof is not None
    assert len(loaded.proof.guesses_P) == LENGTH // 2
    assert facts.sha256 == json.loads((tmp_path / CONFIG).read_text())["sha256"]
    assert "strategy" not in use(tmp_path)


def test_matrices_of_whole_blocks_take_half_the_bytes_of_bfloat16(head: HeadArtefact, tmp_path: Path) -> None:
    matrices = {"fc.weight": torch.randn(64, 96), "midlayer.mlp.up_proj.weight": torch.randn(64, 40)}
    artefact.save(tmp_path, replace(head, tensors=matrices), "")
    written, read = load_file(tmp_path / WEIGHTS), artefact.load(tmp_path).tensors
    assert written["fc.weight"].nbytes == 64 * 96 * 8.5 / 8
    for name, matrix in matrices.items():
        assert read[name].dtype == torch.bfloat16
        assert (read[name] - matrix).norm() < 0.01 * matrix.norm()
    assert torch.equal(read["midlayer.mlp.up_proj.weight"], matrices["midlayer.mlp.up_proj.weight"].bfloat16())


def test_a_folder_of_the_first_format_still_opens(use: Use, head: HeadArtefact, tmp_path: Path) -> None:
    artefact.save(tmp_path, replace(head, proof=None), "")
    numbers = {name: each.bfloat16() if each.is_floating_point() else each for name, each in head.tensors.items()}
    save_file({**numbers, "target.witness": head.witness_WH.bfloat16()}, tmp_path / WEIGHTS)
    said = json.loads((tmp_path / CONFIG).read_text())
    old = {name: said[name] for name in ("method", "settings", "layer")}
    (tmp_path / CONFIG).write_text(json.dumps(old))
    assert artefact.load(tmp_path).origin == Origin()
    assert "strategy" not in use(tmp_path)


def test_a_folder_of_the_third_format_has_eight_bits_throughout(use: Use, head: HeadArtefact, tmp_path: Path) -> None:
    """Heads that were written before MLPs had four bits open as they were."""
    artefact.save(tmp_path, replace(head, proof=None), "")
    kept = load_file(tmp_path / WEIGHTS)
    mlps = [name for name in head.tensors if ".mlp." in name]
    save_file(kept | {name: in_q8_0(head.tensors[name]).data for name in mlps}, tmp_path / WEIGHTS)
    said = json.loads((tmp_path / CONFIG).read_text())
    del said["blocks"]
    (tmp_path / CONFIG).write_text(json.dumps({**said, "format": 3, "sha256": hash_of(tmp_path / WEIGHTS)}))
    read = artefact.load(tmp_path).tensors
    assert all(torch.allclose(read[name].float(), head.tensors[name].float(), atol=0.02) for name in mlps)
    assert "strategy" not in use(tmp_path)


def test_blocks_that_no_head_is_written_in_are_named(head: HeadArtefact, tmp_path: Path) -> None:
    artefact.save(tmp_path, replace(head, proof=None), "")
    said = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**said, "blocks": {"fc.weight": "Q9_9"}}))
    with pytest.raises(BadHead, match="names the blocks Q9_9"):
        artefact.load(tmp_path)


def another_target(head: HeadArtefact, proof: Proof) -> HeadArtefact:
    return replace(head, proof=replace(proof, states_TF=torch.randn(proof.states_TF.shape).bfloat16()))


def other_guesses(head: HeadArtefact, proof: Proof) -> HeadArtefact:
    return replace(head, proof=replace(proof, guesses_P=(proof.guesses_P + 1) % VOCAB_SIZE))


@pytest.mark.parametrize(
    ("edit", "told"),
    [(another_target, "another fine-tune of the same base"), (other_guesses, "guesses 0 of 16 tokens as it did")],
    ids=["target", "guesses"],
)
def test_what_computes_otherwise_than_in_training_is_named_and_drafts_all_the_same(
    use: Use, head: HeadArtefact, tmp_path: Path, edit: Edit, told: str
) -> None:
    assert head.proof is not None
    artefact.save(tmp_path, edit(head, head.proof), "")
    assert told in use(tmp_path)


def test_a_proof_that_held_is_not_repeated_until_files_change(
    use: Use, head: HeadArtefact, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes half a second of the start with a real model. One that did not hold is told each time."""
    calls: list[Proof] = []

    def counted(proof: Proof, states_TF: torch.Tensor) -> float:
        calls.append(proof)
        return agreement(proof, states_TF)

    monkeypatch.setattr("parlay.drafters.heads.proving.agreement", counted)
    artefact.save(tmp_path, head, "")
    for _ in range(2):
        use(tmp_path)
        assert len(calls) == 1
    os.utime(tmp_path / WEIGHTS, ns=(0, 0))
    use(tmp_path)
    assert len(calls) == 2
    os.utime(next(model.glob("*.safetensors")), ns=(0, 0))
    use(tmp_path)
    assert len(calls) == 3
    os.utime(model / CONFIG, ns=(0, 0))
    use(tmp_path)
    assert len(calls) == 4
    assert head.proof is not None
    artefact.save(tmp_path, other_guesses(head, head.proof), "")
    for _ in range(2):
        assert "guesses 0 of 16" in use(tmp_path)
    assert len(calls) == 6


def test_weights_that_were_changed_or_poisoned_are_refused(head: HeadArtefact, tmp_path: Path) -> None:
    artefact.save(tmp_path / "good", head, "")
    shutil.copytree(tmp_path / "good", tmp_path / "changed")
    tensors = load_file(tmp_path / "good" / WEIGHTS)
    tensors["fc.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "changed" / WEIGHTS)
    with pytest.raises(BadHead, match=r"is not the file that config\.json names by its SHA-256"):
        artefact.load(tmp_path / "changed")

    poisoned = {**head.tensors, "fc.weight": torch.full_like(head.tensors["fc.weight"], torch.inf)}
    artefact.save(tmp_path / "poisoned", replace(head, tensors=poisoned), "")
    with pytest.raises(BadHead, match=r"fc\.weight holds numbers that are not finite"):
        artefact.load(tmp_path / "poisoned")

    said = json.loads((tmp_path / "good" / CONFIG).read_text())
    (tmp_path / "good" / CONFIG).write_text(json.dumps({**said, "format": artefact.FORMAT + 1}))
    with pytest.raises(BadHead, match="later version of Parlay: upgrade"):
        artefact.load(tmp_path / "good")


@pytest.mark.parametrize("method", [EAGLE3, MEDUSA])
def test_tensors_that_are_missing_left_over_or_misshapen_are_named(method: str, model: Path) -> None:
    opened = random_heads(models.load(str(model), LOAD).spec)(method, "")
    assert opened is not None
    held = opened.artefact
    check_tensors(held)
    name = next(name for name in held.tensors if name.endswith("weight") and name != "lm_head.weight")
    fewer = {key: each for key, each in held.tensors.items() if key != name}
    for tensors, told in (
        (fewer, f"lacks {name}"),
        ({**held.tensors, "stray.weight": torch.zeros(2)}, "does not know stray.weight"),
        ({**held.tensors, name: torch.zeros(3, 3)}, f"has in another shape {name}"),
    ):
        with pytest.raises(BadHead, match=told):
            check_tensors(replace(held, tensors=tensors))


def test_each_kind_of_head_is_known_wherever_kinds_are_listed(model: Path) -> None:
    kinds = {name for name, entry in catalogue().items() if entry.family == "heads"} - HEADS_OF_OTHERS.keys()
    assert kinds == METHODS.keys() - {EARLY_EXIT, DISTILL}, "those of parlay train, but for two that make models"
    assert kinds == HEADS.keys() - HEADS_OF_OTHERS.keys(), "those of parlay plan"
    find = random_heads(models.load(str(model), LOAD).spec)
    for kind in kinds:
        opened = find(kind, "")
        assert opened is not None
        check_tensors(opened.artefact)
        with pytest.raises(BadHead, match=f"a head for {kind} lacks"):
            check_tensors(replace(opened.artefact, tensors={}))


def test_a_card_has_front_matter_that_the_hub_reads(head: HeadArtefact, tmp_path: Path) -> None:
    artefact.save(tmp_path, head, front_matter(EAGLE3, head.origin, (0.51, 0.26), {"loss": 8.3}) + "\n# Text\n")
    said, text = read_card(tmp_path)
    assert (said["license"], said["base_model"], text) == ("apache-2.0", "someone/toy", "# Text")
    assert {"parlay-drafter", EAGLE3} <= set(said["tags"])
    assert said["parlay"]["acceptance"] == [0.51, 0.26]


@pytest.mark.parametrize(
    "change",
    [
        {"proof.ids": torch.full((32,), VOCAB_SIZE)},
        {"proof.ids": torch.zeros(33, dtype=torch.int64)},
        {"proof.ids": torch.zeros(4, 8, dtype=torch.int64)},
        {"proof.ids": torch.tensor(3)},
        {"proof.layers": torch.tensor(3)},
        {"proof.layers": torch.tensor([0.5])},
        {"proof.layers": torch.zeros(0, dtype=torch.int64)},
        {"proof.states": torch.zeros(3, 3)},
        {"proof.guesses": torch.full((16,), 1 << 40)},
        {"proof.guesses": torch.zeros(99, dtype=torch.int64)},
    ],
)
def test_proofs_that_make_no_sense_are_refused(
    head: HeadArtefact, tmp_path: Path, change: dict[str, torch.Tensor]
) -> None:
    """The target runs the text of a proof, and its states are compared with those there."""
    artefact.save(tmp_path, head, "")
    save_file({**load_file(tmp_path / WEIGHTS), **change}, tmp_path / WEIGHTS)
    said = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**said, "sha256": ""}))
    with pytest.raises(BadHead, match="holds no draft head that can be read") as caught:
        artefact.load(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_proof_by_layers_that_are_not_there_proves_nothing(model: Path) -> None:
    runner = models.load(str(model), LOAD)
    assert target_states(runner, [1, 2, 3], (runner.spec.num_layers + 1,)) is None


@pytest.mark.parametrize("change", [{"proof.states": torch.zeros(LENGTH, 5)}, {"proof.layers": torch.tensor([0, 0])}])
def test_a_proof_of_something_else_is_passed_over(
    use: Use, head: HeadArtefact, tmp_path: Path, change: dict[str, torch.Tensor]
) -> None:
    """It proves nothing, and the head drafts all the same."""
    artefact.save(tmp_path, head, "")
    save_file({**load_file(tmp_path / WEIGHTS), **change}, tmp_path / WEIGHTS)
    said = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**said, "sha256": ""}))
    assert use(tmp_path) == ""


@pytest.mark.parametrize("front", ["a: [b", "- a", "tags: 5", "date: 2026-99-99"])
def test_a_card_that_is_broken_is_one_line(tmp_path: Path, front: str) -> None:
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\ntext")
    with pytest.raises(BadHead, match=r"README\.md can't be read") as caught:
        read_card(tmp_path)
    assert len(str(caught.value).splitlines()) == 1
