"""Models in GGUF files compute what the same checkpoint computes from a folder, in every family and format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from parlay import LLM, SamplingParams, models
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_tensors, load_tokenizer, load_weights, read_config
from parlay.models.weights.dequantize import dense
from parlay.models.weights.stored import StoredTensor
from parlay.options import LoadOptions
from parlay.testing.checkpoints import NATIVE, VOCAB_SIZE, save_random
from parlay.types import ParlayError, Segment
from tests.models import gguf_files

FP32 = LoadOptions(dtype="float32", device="cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "parlay"


def logits(model: Path) -> Tensor:
    runner = models.load(str(model), FP32, cache_tokens=256)
    tokens = torch.randint(VOCAB_SIZE, (96,), generator=torch.Generator().manual_seed(1)).tolist()
    runner.open(0, tokens)
    assert runner.reserve(0, len(tokens))
    return runner.forward([Segment(0, tuple(tokens))]).logits_RV


@pytest.mark.parametrize("name", sorted(NATIVE.keys() - {"gemma2", "mistral-window", "qwen2-window"}))
def test_every_family_computes_the_same_from_both_kinds_of_file(name: str, tmp_path: Path) -> None:
    """Windows and Gemma 2 are read from folders alone."""
    save_random(name, tmp_path)
    written = gguf_files.write(tmp_path / "model.gguf", tmp_path)
    expected, config = read_config(tmp_path), read_config(written)
    same = ("vocab_size", "hidden_size", "num_layers", "num_kv_heads", "head_dim", "max_context", "tie_embeddings")
    assert all(getattr(config, field) == getattr(expected, field) for field in (*same, "qkv_bias", "qk_norm"))
    torch.testing.assert_close(logits(written), logits(tmp_path), rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_matrices_keep_their_blocks_and_their_values(kind: Kind, tmp_path: Path) -> None:
    """Also where rows of queries and keys are put back: whole rows move, and no number changes."""
    save_random("llama", tmp_path)
    written = gguf_files.write(tmp_path / "model.gguf", tmp_path, kind=kind)
    config = read_config(written)
    expected = load_tensors(tmp_path, config)
    for name, weight in load_weights(written, config).items():
        if expected[name].dim() == 1:
            assert isinstance(weight, Tensor)
            assert weight.equal(expected[name].float())
        else:
            assert isinstance(weight, StoredTensor)
            assert weight.format.name == kind.name
            assert dense(weight).equal(gguf_files.numbers(expected[name], kind))


def test_the_built_in_model_writes_the_same_text_from_a_file(tmp_path: Path) -> None:
    written = gguf_files.write(tmp_path / "mini.gguf", resolve("parlay-mini"), kind=Kind.BF16, tokenizer=True)
    params = SamplingParams(max_tokens=24, temperature=0)
    conversation = [{"role": "user", "content": "Repeat this: the cat sat on the mat, 12 times."}]
    texts = []
    for model in ("parlay-mini", str(written)):
        llm = LLM(model, load=FP32)
        texts.append(
            [llm.chat([conversation], params)[0].outputs[0].text, llm.tokenizer.special_tokens_map["eos_token"]]
        )
    assert texts[0] == texts[1]
    assert texts[0][0]


def test_a_tokenizer_is_kept_and_one_beside_the_file_wins(tmp_path: Path, cache: Path) -> None:
    folder = resolve("parlay-mini")
    written = gguf_files.write(tmp_path / "mini.gguf", folder, tokenizer=True)
    text = "Hello, wörld: 12 <|end|> times"
    expected = load_tokenizer(folder).encode(text)
    assert load_tokenizer(written).encode(text) == expected
    (kept,) = (cache / "tokenizers").iterdir()
    assert load_tokenizer(written).encode(text) == expected
    named = gguf_files.write(tmp_path / "named.gguf", folder, tokenizer=True, keys={"general.name": "another"})
    assert load_tokenizer(named).encode(text) == expected
    assert list((cache / "tokenizers").iterdir()) == [kept], "models of one vocabulary share it"
    kept.write_text("{")
    assert load_tokenizer(written).encode(text) == expected  # a damaged one is made again
    beside = tmp_path / "tokenizer.json"
    beside.write_bytes((folder / "tokenizer.json").read_bytes())
    assert load_tokenizer(written).encode(text) == expected
    beside.write_text("{")
    with pytest.raises(ParlayError, match=r"tokenizer\.json for it can't be read"):
        load_tokenizer(written)


def test_split_files_are_one_model_and_an_absent_part_is_named(tmp_path: Path) -> None:
    save_random("qwen3", tmp_path)
    first = gguf_files.write(tmp_path / "model.gguf", tmp_path, split=8)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert len(parts) > 2
    assert logits(parts[1]).equal(logits(first))
    parts[2].unlink()
    with pytest.raises(ParlayError, match=f"parts are not beside it; the first: {parts[2].name}"):
        read_config(first)
