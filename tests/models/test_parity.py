"""The native decoder computes what transformers computes, family by family, on tiny random checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from parlay import models
from parlay.compiled.library import SWITCH
from parlay.models import NativeRunner
from parlay.models.torch_ops import eager
from parlay.models.torch_ops.kernels import judge
from parlay.models.transformers_adapter.runner import AdapterRunner
from parlay.options import LoadOptions
from parlay.testing.checkpoints import NATIVE, VOCAB_SIZE, random_model, save_random
from parlay.types import ParlayError, Runner, Segment, Tree, trees


def tree_logits(runner: Runner, tokens: list[int]) -> Tensor:
    """Logits of the last token and of the nodes below it, ``[1 + nodes, V]``."""
    cached = runner.open(1, tokens)
    assert runner.reserve(1, len(tokens) + len(TREE))
    runner.forward([Segment(1, tuple(tokens[cached:-1]))])
    runner.keep(1, ())
    return runner.forward([Segment(1, (tokens[-1],), TREE)]).logits_RV


def all_logits(runner: Runner, tokens: list[int]) -> Tensor:
    """``[N, V]``, fed in two chunks so that cached keys matter."""
    runner.open(0, tokens)
    assert runner.reserve(0, len(tokens))
    first = runner.forward([Segment(0, tuple(tokens[:20]))]).logits_RV
    assert runner.keep(0, ()) == 20
    rest = runner.forward([Segment(0, tuple(tokens[20:]))]).logits_RV
    runner.release(0)
    return torch.cat([first, rest])


TREE = Tree((3, 9, 27, 17, 51, 25, 11, 33, 35, 41), (-1, 0, 1, 2, 1, -1, 5, 6, 7, 8))


@pytest.mark.parametrize("kernels", ["compiled", "exact", "masked"])
@pytest.mark.parametrize("name", NATIVE)
def test_native_logits_equal_those_of_transformers(
    name: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a text that is longer than the windows of its layers, and for a tree below it."""
    if kernels != "compiled":
        monkeypatch.setenv(SWITCH, "0")
    if kernels == "masked":
        monkeypatch.setattr(eager, "judge", lambda *asked, **how: replace(judge(*asked, **how), form=None))
    model = save_random(name, tmp_path)
    runner = models.load(str(tmp_path), LoadOptions(dtype="float32", device="cpu"), cache_tokens=256)
    assert isinstance(runner, NativeRunner)
    tokens = torch.randint(VOCAB_SIZE, (96,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(all_logits(runner, tokens).float(), expected, rtol=0, atol=2e-5)
    found = tree_logits(runner, tokens)
    for path in trees.leaf_paths(TREE):
        text = tokens + [TREE.tokens[node] for node in path]
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([text])).logits[0, len(tokens) - 1 :]
        torch.testing.assert_close(found[[0, *(1 + node for node in path)]], expected, rtol=0, atol=2e-5)


def test_load_picks_the_adapter_for_what_is_not_native_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_random("gpt2", tmp_path)
    with caplog.at_level("INFO", logger="parlay.models"):
        runner = models.load(str(tmp_path), LoadOptions(device="cpu"))
    assert isinstance(runner, AdapterRunner)
    assert runner.spec.name == str(tmp_path)
    assert "GPT2LMHeadModel" in caplog.text
    assert isinstance(models.load(AutoModelForCausalLM.from_pretrained(tmp_path)), AdapterRunner)


def test_arguments_that_cannot_be_honoured_are_errors_that_name_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype=int7"):
        models.load(str(tmp_path), LoadOptions(dtype="int7"))
    with pytest.raises(ValueError, match="device 'abacus'"):
        models.load(str(tmp_path), LoadOptions(device="abacus"))
    with pytest.raises(ValueError, match="a loaded model keeps its own"):
        models.load(random_model("gpt2"), LoadOptions(dtype="bfloat16"))
    (tmp_path / "config.json").write_text('{"model_type": "never-heard-of", "architectures": ["Never"]}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ParlayError, match="transformers can't load"):
        models.load(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rope_parameters": {"rope_type": "never-heard-of", "rope_theta": 10_000.0}}, "never-heard-of"),
        ({"num_key_value_heads": 3}, "its tensors have other shapes than its config.json describes$"),
    ],
)
def test_a_config_that_transformers_stumbles_over_is_one_line(
    change: dict[str, object], reason: str, tmp_path: Path
) -> None:
    save_random("llama", tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, **change}))
    with pytest.raises(ParlayError, match=rf"transformers can't load .*{reason}") as caught:
        models.load(str(tmp_path), LoadOptions(device="cpu"))
    assert "\n" not in str(caught.value)
