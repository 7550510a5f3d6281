"""`parlay prune`: zeros where a text says that they cost least, and checkpoints that open everywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from parlay import LLM, models
from parlay.cli import main
from parlay.models.gguf.importance import ReadText
from parlay.models.loading import load_tokenizer, load_weights, read_config
from parlay.models.pruning.patterns import Pattern
from parlay.models.pruning.prune import Cut, pruned
from parlay.models.weights.fused import as_tensor
from parlay.models.weights.shapes import BadCheckpoint
from parlay.options import LoadOptions
from parlay.testing.checkpoints import VOCAB_SIZE, save_random
from parlay.testing.toy_tokenizers import toy_tokenizer
from parlay.types import Segment

TEXT = toy_tokenizer(VOCAB_SIZE).decode(
    torch.randint(3, VOCAB_SIZE, (200,), generator=torch.Generator().manual_seed(0))
)
DOWN, GATE = "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer."""
    made = tmp_path_factory.mktemp("llama")
    save_random("llama", made)
    toy_tokenizer(VOCAB_SIZE).save_pretrained(made)
    return made


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def run(*words: object) -> int:
    return main(["prune", *map(str, words)])


def logits(model: str, ids: Sequence[int]) -> Tensor:
    runner = models.load(model, LoadOptions(dtype="float32", threads=1))
    runner.open(0, ids)
    assert runner.reserve(0, len(ids))
    return runner.forward([Segment(0, tuple(ids))]).logits_RV


@pytest.mark.parametrize(("text", "zeros", "group"), [("0.5", 0.5, 0), ("2:4", 0.5, 4), ("1:4", 0.75, 4)])
def test_patterns_set_the_lowest_scores_of_each_row_or_group_to_zero(text: str, zeros: float, group: int) -> None:
    pattern = Pattern.read(text)
    assert (pattern.zeros, pattern.group) == (zeros, group)
    weight_OI = torch.arange(1.0, 33).view(2, 16)
    scores_OI = torch.rand(2, 16, generator=torch.Generator().manual_seed(0))
    made = pattern.applied(weight_OI, scores_OI).view(-1, group or 16)
    kept = made != 0
    assert (kept.sum(-1) == (1 - zeros) * made.shape[1]).all()
    grouped = scores_OI.view(made.shape)
    assert (grouped.masked_fill(~kept, 9).amin(-1) > grouped.masked_fill(kept, -1).amax(-1)).all()
    assert torch.equal(made[kept], weight_OI.view(made.shape)[kept])


def test_wanda_counts_a_weight_by_its_input_on_the_text(folder: Path) -> None:
    """By hand: what the first layer's queries read is the normed embedding."""
    config = read_config(folder)
    weights = {name: as_tensor(weight, torch.float32) for name, weight in load_weights(folder, config).items()}
    ids = load_tokenizer(folder).encode(TEXT)
    _, made = pruned(config, weights, Cut(Pattern.read("0.5")), ReadText(ids))
    rows_TH = weights["model.embed_tokens.weight"][torch.tensor(ids)]
    normed_TH = torch.nn.functional.rms_norm(rows_TH, rows_TH.shape[1:], eps=config.rms_norm_eps)
    name = "model.layers.0.self_attn.q_proj.weight"
    norms_H = (normed_TH * weights["model.layers.0.input_layernorm.weight"]).norm(dim=0)
    scores_OH = weights[name].abs() * norms_H
    lowest = scores_OH.argsort(-1)[:, : scores_OH.shape[1] // 2]
    assert torch.equal(made[name].float() == 0, torch.zeros_like(scores_OH, dtype=torch.bool).scatter_(1, lowest, True))


def test_wanda_changes_what_the_model_computes_on_the_text_less_than_sizes_alone(folder: Path) -> None:
    """With inputs of very different sizes, which random models lack: some channels of the embedding are large."""
    config = read_config(folder)
    weights = {name: as_tensor(weight, torch.float32) for name, weight in load_weights(folder, config).items()}
    loud = torch.ones(config.hidden_size)
    loud[::5] = 20.0
    for layer in range(config.num_layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = loud
    ids = load_tokenizer(folder).encode(TEXT)
    name = "model.layers.0.self_attn.q_proj.weight"
    rows_TH = weights["model.embed_tokens.weight"][torch.tensor(ids)]
    normed_TH = torch.nn.functional.rms_norm(rows_TH, rows_TH.shape[1:]) * loud
    errors = []
    for seen in (ReadText(ids), None):
        _, made = pruned(config, weights, Cut(Pattern.read("2:4")), seen)
        errors.append(float((normed_TH @ (made[name].float() - weights[name]).T).norm()))
    assert errors[0] < 0.7 * errors[1]


def test_a_pruned_folder_opens_here_and_in_transformers_with_the_same_logits(folder: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    (tmp_path / "text.txt").write_text(TEXT)
    assert run(folder, "--to", made, "--pattern", "2:4", "--text", tmp_path / "text.txt", "--threads", 1) == 0
    stored = load_file(made / "model.safetensors")
    groups = stored[DOWN].view(stored[DOWN].shape[0], -1, 4)
    assert ((groups != 0).sum(-1) <= 2).all()
    ids = [3, 5, 8, 13, 21]
    theirs = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32, use_safetensors=True)
    with torch.no_grad():
        torch.testing.assert_close(logits(str(made), ids), theirs(torch.tensor([ids])).logits[0], atol=1e-4, rtol=0)
    assert AutoTokenizer.from_pretrained(made).encode("a b") == load_tokenizer(folder).encode("a b")


def test_a_gguf_file_becomes_a_folder_with_its_tokenizer(tmp_path: Path, text: Path) -> None:
    from parlay.models.fetch.resolving import resolve

    file = resolve("smollm2-135m-draft")
    made = tmp_path / "made"
    assert run(file, "--to", made, "--keep-layers", 1, "--method", "magnitude") == 0
    tokenizer = load_tokenizer(file)
    assert load_tokenizer(made).encode(TEXT) == tokenizer.encode(TEXT)
    assert AutoTokenizer.from_pretrained(made).encode(TEXT) == tokenizer.encode(TEXT)
    assert read_config(made).eos_ids == read_config(file).eos_ids


def test_width_and_depth_leave_whole_units_and_layers(folder: Path, tmp_path: Path, text: Path) -> None:
    made = tmp_path / "made"
    words = ("--keep-layers", "0,2", "--keep-width", 0.5, "--pattern", 0.5, "--text", text)
    assert run(folder, "--to", made, *words) == 0
    config, before = read_config(made), load_weights(folder, read_config(folder))
    assert (config.num_layers, config.intermediate_size) == (2, 32)
    stored = load_file(made / "model.safetensors")
    assert stored[DOWN].shape == (32, 32)
    query = "model.layers.{}.self_attn.q_proj.weight"
    kept = stored[query.format(1)]
    assert torch.equal(kept[kept != 0], as_tensor(before[query.format(2)], torch.bfloat16)[kept != 0])
    with LLM(str(made), strategy="none") as llm:
        assert llm.generate([[1, 2, 3]])[0].outputs[0].token_ids


def test_inner_units_stay_by_what_the_last_matrix_makes_of_them(folder: Path) -> None:
    config = read_config(folder)
    weights = {name: as_tensor(weight, torch.float32) for name, weight in load_weights(folder, config).items()}
    weights[DOWN][:, 40:] *= 100
    narrow, made = pruned(config, weights, Cut(None, 0.5), None)
    assert (config.intermediate_size, narrow.intermediate_size) == (64, 32)
    assert torch.equal(made[GATE][-24:], weights[GATE][40:].bfloat16())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--pattern", "3:2"), "N:M needs 0 < N < M"),
        (("--pattern", "half"), "give a share of zeros such as 0.5, or N:M such as 2:4"),
        (("--pattern", "1.5"), "a share lies between 0 and 1"),
        (("--pattern", "0.5"), "add --text FILE, or use --method magnitude"),
        ((), "nothing to prune: add --pattern, --keep-width or --keep-layers"),
        (("--keep-width", "0"), "--keep-width must be above 0 and at most 1"),
        (("--keep-layers", "9"), "--keep-layers must be between 1 and 3"),
        (("--keep-layers", "2,1"), "give rising numbers from 0 to 2"),
        (("--pattern", "4:7", "--method", "magnitude"), "which 7 does not divide; give a share such as 0.5"),
        (("--pattern", "0.5", "--text", "{short}"), "the text has"),
        (("--pattern", "0.5", "--text", "{none}"), "can't read the text"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_can_not_be_pruned_is_one_line(
    words: Sequence[str], line: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a b")
    named = [word.format(short=short, none=tmp_path / "none") for word in words]
    assert run(folder, "--to", tmp_path / "made", *named) in (1, 2)
    told = capsys.readouterr().err
    assert line in told
    assert told.count("\n") == 1
    assert not (tmp_path / "made" / "model.safetensors").exists()


def test_a_folder_that_holds_something_is_left_alone(folder: Path, text: Path) -> None:
    assert run(folder, "--to", text.parent, "--keep-layers", 1) == 2
    assert run(folder, "--to", text, "--keep-layers", 1) == 2
    assert [file.name for file in text.parent.iterdir()] == ["text.txt"]


def test_a_pruned_checkpoint_of_another_shape_is_one_line(folder: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    assert run(folder, "--to", made, "--keep-width", 0.5, "--method", "magnitude") == 0
    said = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**said, "intermediate_size": 64}))
    with pytest.raises(BadCheckpoint, match=r"of another shape: .*gate_proj.weight \[32, 32\] instead of \[64, 32\]"):
        models.load(str(made))


def test_mixtures_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_random("qwen3-moe", tmp_path / "moe")
    toy_tokenizer(VOCAB_SIZE).save_pretrained(tmp_path / "moe")
    assert run(tmp_path / "moe", "--to", tmp_path / "made", "--pattern", "2:4", "--method", "magnitude") == 1
    assert "can't be pruned" in capsys.readouterr().err
