"""MLX as a runner: options and folders that it can't have, and where mlx-lm is installed, its rows and texts."""

from __future__ import annotations

import importlib.util
import json
import resource
import sys
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parlay import LLM, SamplingParams, models
from parlay.cache import Budget
from parlay.models import UnsupportedModel
from parlay.options import LoadOptions, UsageError
from parlay.testing.checkpoints import random_model, save_random
from parlay.testing.conformance import KitLength, Stage, check_runner, run_check, runner_stage, subject_of
from parlay.types import ParlayError, Segment, Tree

IN_MLX = LoadOptions(runner="mlx", threads=1)
NOISE = 1e-4
needs_package = pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="mlx-lm is not installed")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"dtype": "float32"}, "dtype float32 is not supported"),
        ({"quantize": "int8"}, r"`mlx_lm.convert -q` makes a smaller folder"),
        ({"kv_cache_dtype": "q8_0"}, "keys and values have the weights' type"),
        ({"lora": "folder"}, "merges no adapters"),
        ({"compile": True}, "torch computes nothing there"),
        ({"ngram_states": 9}, "looks no layers up"),
    ],
)
def test_options_that_mlx_can_not_honour_are_refused(changed: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        models.load("parlay-mini", replace(IN_MLX, **changed))


def test_files_weights_on_disk_and_a_missing_package_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"is a GGUF file: name a folder of safetensors"):
        models.load(str(file), IN_MLX)
    with pytest.raises(UnsupportedModel, match="not MLX: remove it"):
        models.load("parlay-mini", IN_MLX, budget=Budget(weights=1 << 30))
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(ParlayError, match=r"pip install 'parlay\[mlx\]'"):
        models.load("parlay-mini", IN_MLX)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits


# ------------------------------------------------------------------------------------------------------------- mlx-lm


@cache
def folder(place: Path, name: str, seed: int = 0) -> str:
    made = place / f"{name}-{seed}"
    made.mkdir()
    save_random(name, made, seed=seed)
    return str(made)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlx")


@pytest.fixture(scope="module")
def stage(place: Path) -> Stage:
    target, draft = folder(place, "llama"), folder(place, "llama", 1)
    return runner_stage(
        "mlx",
        lambda capacity: models.load(target, IN_MLX, cache_tokens=capacity),
        lambda: models.load(draft, IN_MLX, cache_tokens=8192),
        NOISE,
    )


@needs_package
def test_logits_are_those_of_a_fresh_prefill_whatever_is_kept_cut_or_copied(stage: Stage) -> None:
    report = check_runner(stage.open_runner, stage.logits_of, noise_bound=NOISE, steps=25)
    assert report.passed, str(report)


@needs_package
@pytest.mark.parametrize("check", ["greedy", "mixed", "forks", "chunks"])
def test_every_text_is_the_one_of_plain_decoding(stage: Stage, check: str) -> None:
    finding = run_check(check, subject_of("union"), stage, KitLength(tokens=16, draws=0))
    assert finding.passed, str(finding)


@needs_package
@pytest.mark.parametrize("name", ["llama-llama3", "llama-yarn", "qwen2", "qwen3", "gemma3", "olmo3", "mixtral"])
def test_trees_and_states_are_those_of_transformers(name: str, place: Path) -> None:
    """Positions by several kinds of rotary embeddings, windows, experts, norms at other places."""
    runner, text = models.load(folder(place, name), IN_MLX, cache_tokens=512), tuple(range(3, 43))
    runner.open(0, text)
    runner.forward([Segment(0, text[:-1], logits_from=len(text) - 1)])
    runner.keep(0, ())
    tree = Tree((5, 7, 6, 7), (-1, -1, 0, 1))
    everything = name not in ("olmo3",)  # its layers have no norm before attention
    taps = (0, 2, runner.spec.num_layers) if everything else (runner.spec.num_layers,)
    out = runner.forward([Segment(0, text[-1:], tree)], taps)
    model = random_model(name)
    for row, path in {0: (), 1: (5,), 2: (7,), 3: (5, 6), 4: (7, 7)}.items():
        with torch.no_grad():
            expected = model(torch.tensor([(*text, *path)]), output_hidden_states=True)
        assert float((out.logits_RV[row] - expected.logits[0, -1]).abs().max()) < 1e-3
        for tap in taps:
            assert float((out.taps[tap][row] - expected.hidden_states[tap][0, -1]).abs().max()) < 1e-3
    if not everything:
        with pytest.raises(ValueError, match=r"runs through MLX, which can't give the hidden states of layers \[0\]"):
            runner.forward([Segment(0, text[-1:])], (0,))


@needs_package
def test_a_model_of_images_has_the_ends_that_its_config_names_beside_its_text(tmp_path: Path) -> None:
    save_random("gemma3", tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    del said["eos_token_id"]
    tensors = {f"language_model.{key}": tensor for key, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    whole = {"model_type": "gemma3", "vocab_size": said["vocab_size"], "text_config": said, "eos_token_id": [2, 7]}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    spec = models.load(str(tmp_path), IN_MLX, cache_tokens=64).spec
    assert (spec.eos_ids, spec.hidden_size) == ((2, 7), said["hidden_size"])


@needs_package
def test_long_prompts_run_their_head_on_few_rows_and_grow_the_pool(place: Path) -> None:
    runner, text = models.load(folder(place, "llama"), IN_MLX), tuple(token % 60 for token in range(600))
    runner.open(0, text)
    assert runner.forward([Segment(0, text[:500], logits_from=500)]).logits_RV.shape == (0, 64)
    assert runner.keep(0, ()) == 500
    out = runner.forward([Segment(0, text[500:], logits_from=99)], (2,))
    assert out.taps[2].shape == (100, runner.spec.hidden_size)
    with torch.no_grad():
        expected_V = random_model("llama")(torch.tensor([text])).logits[0, -1]
    assert float((out.logits_RV[0] - expected_V).abs().max()) < 1e-3
    runner.check()


@needs_package
def test_a_window_that_mlx_lm_leaves_out_is_said(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("gemma3", "llama"):
        models.load(folder(place, name), IN_MLX, cache_tokens=64)
    assert not caplog.records
    models.load(folder(place, "mistral-window"), IN_MLX, cache_tokens=64)
    assert "mlx-lm ignores the sliding window of" in caplog.text


@needs_package
def test_folders_that_mlx_can_not_run_are_one_line(place: Path, tmp_path: Path) -> None:
    for name, words in {"mamba": "which can't be taken back where a draft fails", "gpt2": "mlx-lm can't load"}.items():
        with pytest.raises(UnsupportedModel, match=words):
            models.load(folder(place, name), IN_MLX)
    own = tmp_path / "own"
    own.mkdir()
    save_random("llama", own)
    said = json.loads((own / "config.json").read_text())
    (own / "evil.py").write_text("raise SystemExit('it ran')")
    (own / "config.json").write_text(json.dumps(said | {"model_file": "evil.py"}))
    with pytest.raises(UnsupportedModel, match=r"brings code of its own \(model_file in config.json\)"):
        models.load(str(own), IN_MLX)
    (own / "config.json").write_text(json.dumps(said | {"model_type": "../evil"}))
    with pytest.raises(UnsupportedModel, match="names no model_type"):
        models.load(str(own), IN_MLX)
    (own / "config.json").write_text(json.dumps(said))
    (own / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UnsupportedModel, match="mlx-lm can't load"):
        models.load(str(own), IN_MLX)
    with pytest.raises(ParlayError, match="memory is too small"):
        models.load(folder(place, "llama"), IN_MLX, budget=Budget(1000))


def in_four_bits(place: Path) -> str:
    """A model as mlx-lm writes it in four bits."""
    from mlx_lm.utils import load_model, quantize_model, save_model

    made = place / "four-bits"
    model, config = quantize_model(*load_model(Path(folder(place, "qwen3"))), group_size=32, bits=4)
    save_model(made, model)
    (made / "config.json").write_text(json.dumps(config))
    return str(made)


@needs_package
def test_strategies_write_the_same_texts_in_any_thread(place: Path) -> None:
    """In four bits, on a thread that did not load the model, with a draft model in MLX, too."""
    found = dict[str, tuple[int, ...]]()
    draft = f"draft-model:model={folder(place, 'qwen3', 1)},shape=tree,width=2"
    with LLM(in_four_bits(place), load=IN_MLX, strategy="none", tokenizer=None) as llm:
        params = SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True)

        def write() -> None:
            for strategy in ("none", "prompt-lookup", "lookahead", draft):
                (output,) = llm.generate([[3, 4, 5, 6] * 4], params, strategy=strategy)
                found[strategy] = tuple(output.outputs[0].token_ids)

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    assert len(found) == 4
    assert len(set(found.values())) == 1
