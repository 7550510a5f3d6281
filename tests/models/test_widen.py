"""A widened checkpoint is larger and slower and says the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from parlay import models
from parlay.models.families.reading import read_config
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_tokenizer
from parlay.options import LoadOptions
from parlay.testing.checkpoints import VOCAB_SIZE, save_random
from parlay.testing.widen import choose_shape, count_parameters, same_sums, widen
from parlay.types import Segment, Tree


def native_rows(directory: Path, dtype: str, tokens: list[int]) -> Tensor:
    """Logits of a prefill and of a tree after it."""
    runner = models.load(str(directory), LoadOptions(dtype=dtype, device="cpu"), cache_tokens=128)
    runner.open(0, tokens)
    assert runner.reserve(0, len(tokens) + 4)
    prefill = runner.forward([Segment(0, tuple(tokens[:-1]))]).logits_RV
    runner.keep(0, ())
    tree = runner.forward([Segment(0, (tokens[-1],), Tree((1, 2, 3), (-1, -1, 0)))]).logits_RV
    return torch.cat([prefill, tree])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3", "llama", "llama-tied", "llama-llama3"])
def test_native_logits_of_a_widened_checkpoint_are_the_same_bits(name: str, dtype: str, tmp_path: Path) -> None:
    save_random(name, tmp_path / "narrow")
    wide = widen(tmp_path / "narrow", tmp_path / "wide", 1_000_000)
    assert wide.hidden_size > 32
    tokens = torch.randint(VOCAB_SIZE, (24,), generator=torch.Generator().manual_seed(2)).tolist()
    narrow_rows, wide_rows = (native_rows(tmp_path / size, dtype, tokens) for size in ("narrow", "wide"))
    assert narrow_rows.equal(wide_rows)


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2"])
def test_transformers_agrees_up_to_the_order_of_its_sums(name: str, tmp_path: Path) -> None:
    """Its float32 products choose their kernel by size, so the bits are promised of the native decoder alone."""
    save_random(name, tmp_path / "narrow")
    widen(tmp_path / "narrow", tmp_path / "wide", 1_000_000)
    ids = torch.arange(24)[None] * 5 % VOCAB_SIZE
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        loaded = [AutoModelForCausalLM.from_pretrained(tmp_path / size, dtype=dtype) for size in ("narrow", "wide")]
        with torch.no_grad():
            narrow, wide = (model(ids).logits for model in loaded)
        torch.testing.assert_close(wide, narrow, rtol=0, atol=tolerance)


@pytest.mark.parametrize("params", [20_000_000, 60_000_000, 100_000_000, 250_000_000, 600_000_000])
def test_sizes_are_met_within_five_percent_in_shapes_that_keep_the_bits_where_there_is_one(params: int) -> None:
    narrow = read_config(resolve("parlay-mini"))
    wide = choose_shape(narrow, params)
    assert count_parameters(wide) == pytest.approx(params, rel=0.05)
    assert wide.hidden_size % 64 == 0
    assert wide.num_heads // wide.num_kv_heads == narrow.num_heads // narrow.num_kv_heads
    assert wide.head_dim == narrow.head_dim
    assert same_sums(narrow, wide) or params > 100_000_000


def test_a_size_that_is_too_small_is_refused() -> None:
    narrow = read_config(resolve("parlay-mini"))
    with pytest.raises(ValueError, match="already; ask for more"):
        choose_shape(narrow, count_parameters(narrow))


def test_the_built_in_model_widens_with_its_tokenizer_and_a_record_of_where_it_came_from(tmp_path: Path) -> None:
    source = resolve("parlay-mini")
    wide = widen(source, tmp_path, 60_000_000)
    record = json.loads((tmp_path / "provenance.json").read_text())
    assert (record["widened_from"], record["parameters"]) == ("parlay-mini", count_parameters(wide))
    assert load_tokenizer(tmp_path).get_vocab() == load_tokenizer(source).get_vocab()
    assert read_config(tmp_path) == wide
    tokens = load_tokenizer(source).encode("The quick brown fox jumps over the lazy dog.")
    for dtype in ("bfloat16", "float32"):
        assert native_rows(source, dtype, tokens).equal(native_rows(tmp_path, dtype, tokens))
