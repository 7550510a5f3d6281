"""Keys and values in blocks of eight bits: what pages hold, what attention makes of it, and who refuses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parlay import LLM, SamplingParams, models
from parlay.cache import BLOCK, Budget
from parlay.cache.pages import Page
from parlay.compiled.library import SWITCH
from parlay.llm.vocabulary import open_draft
from parlay.models.compiled.layout import write_in_blocks
from parlay.models.config import DecoderConfig
from parlay.models.native import CacheRefused, NativeRunner
from parlay.models.random_decoder import save_decoder
from parlay.options import LoadOptions, UsageError
from parlay.types import Features, Prefix, Segment, Tree
from tests.models.test_bits import KERNELS, random_weights, runs_here, text

CPU = torch.device("cpu")
CONFIG = DecoderConfig(
    architecture="test", vocab_size=97, num_layers=2, rms_norm_eps=1e-6, max_context=4096, qk_norm=True,
    hidden_size=128, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return random_weights(CONFIG)


@pytest.fixture(params=[name for name in KERNELS if name != "0" and runs_here(name)])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(SWITCH, request.param)
    return str(request.param)


def make(weights: dict[str, Tensor], cached: str, config: DecoderConfig = CONFIG) -> NativeRunner:
    return NativeRunner(config, weights, dtype=torch.float32, device=CPU, max_tokens_cached=2048, kv_cache_dtype=cached)


def read(runner: NativeRunner, tokens: tuple[int, ...]) -> list[Page]:
    """Cache a text; the pages that hold it."""
    runner.open(0, tokens)
    assert runner.reserve(0, len(tokens) + 64)
    runner.forward([Segment(0, tokens, logits_from=len(tokens))])
    runner.keep(0, ())
    return list(runner._store._live[0].table)


def dequantised(page: Page, slot: int) -> Tensor:
    """What blocks stand for, ``[layers, 2, kv_heads, D]``: keys turned back."""
    key_codes, key_scales, value_codes, value_scales = page.row(slot)
    keys = (key_codes.flatten(-2).int() - 128) * key_scales.clone().view(torch.float16).float()
    values = value_codes.clone().view(torch.int8).unflatten(-1, (-1, 32)) * value_scales.clone().view(torch.float16)
    turned = torch.ones(1, 1)
    for _ in range(5):
        turned = torch.kron(turned, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    return torch.stack(((keys @ turned / 32**0.5).flatten(-2), values.float().flatten(-2)), 1)


def test_pages_hold_each_row_rounded(weights: dict[str, Tensor], kernels: str) -> None:
    """Layer 0 of a float32 cache, rounded slowly, has the codes and scales of the cache in blocks, but for ties."""
    tokens = text(37)
    plain, blocks = (read(make(weights, cached), tokens) for cached in ("float32", "q8_0"))
    for slot in range(len(tokens)):
        wanted = Page(torch.zeros_like(blocks[0].memory[:, :, :, :1]), lanes=blocks[0].lanes)
        row = plain[slot // BLOCK].row(slot % BLOCK)[0]
        write_in_blocks(wanted.row(0), row)
        for made, slow in zip(blocks[slot // BLOCK].row(slot % BLOCK), wanted.row(0), strict=True):
            assert (made[0].int() - slow[0].int()).abs().max() <= 1
        largest = row[0].abs().max()
        assert (dequantised(blocks[slot // BLOCK], slot % BLOCK)[0] - row[0]).abs().max() < largest / 100


def test_attention_is_that_over_the_rounded_rows(weights: dict[str, Tensor], kernels: str) -> None:
    """A slow reference: float32 attention over what the blocks stand for, behind more than one block of keys."""
    tokens, tree = text(300), Tree((7, 8, 9, 10), (-1, 0, 0, 2))
    plain, blocks = make(weights, "float32"), make(weights, "q8_0")
    exact = read(plain, tokens)
    rounded = read(blocks, tokens)
    segment = Segment(0, (5,), tree)
    unrounded = plain.forward([segment]).logits_RV
    for slot in range(len(tokens)):
        exact[slot // BLOCK].row(slot % BLOCK)[0].copy_(dequantised(rounded[slot // BLOCK], slot % BLOCK))
    expected, found = (runner.forward([segment]).logits_RV for runner in (plain, blocks))
    assert (found - expected).abs().max() < 0.3 * (unrounded - expected).abs().max()
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


def test_a_prefix_is_cached_in_blocks_too(weights: dict[str, Tensor], kernels: str) -> None:
    states = Prefix(torch.randn(2, 2, 2, 19, 64, generator=torch.Generator().manual_seed(1)))
    features = replace(Features(torch.randn(1, 128, generator=torch.Generator().manual_seed(2))), prefix=states)
    found = []
    for cached in ("float32", "q8_0"):
        runner = make(weights, cached)
        read(runner, text(20))
        found.append(runner.forward([Segment(0, (5,), Tree((0,), (-1,)), features=features)]).logits_RV)
    torch.testing.assert_close(*found, atol=0.1, rtol=0.1)


def test_keys_and_values_may_be_of_another_plain_type_than_the_weights(weights: dict[str, Tensor]) -> None:
    """Half the bytes, and other logits than of float32, but nearly the same."""
    rows, sizes = [], []
    for cached in ("float32", "bfloat16"):
        runner = make(weights, cached)
        sizes.append(read(runner, text(20))[0].rows.nbytes)
        rows.append(runner.forward([Segment(0, (5,))]).logits_RV)
    assert sizes[0] == 2 * sizes[1]
    assert not torch.equal(*rows)
    torch.testing.assert_close(*rows, atol=0.1, rtol=0.1)


def test_memory_counts_the_bytes_of_blocks() -> None:
    """A given memory holds as many tokens as its bytes say: 34 bytes for 32 numbers, 64 in bfloat16."""
    room = {}
    for cached in ("bfloat16", "q8_0"):
        with LLM("parlay-mini", memory="8MiB", kv_cache_dtype=cached) as llm:
            room[cached] = llm.runner.capacity()
    assert room["q8_0"] == pytest.approx(64 / 34 * room["bfloat16"], rel=0.01)


def test_the_default_strategy_writes_the_text_of_plain_decoding_and_reuses_prefixes() -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    with LLM("parlay-mini", kv_cache_dtype="q8_0") as llm:
        assert "q8_0" in llm.runner.spec.kernels
        plain = llm.generate("Once upon a time", params, strategy="none")[0].outputs[0]
        drafted = llm.generate("Once upon a time", params)[0].outputs[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.metrics.cached_tokens > 0


def test_torch_says_that_it_has_no_such_cache(weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    with pytest.raises(CacheRefused, match="only the compiled decoder has it, and PARLAY_COMPILED=0; leave it"):
        make(weights, "q8_0")


def test_heads_that_are_no_whole_blocks_are_refused_and_a_draft_that_has_them_keeps_its_type(tmp_path: Path) -> None:
    config = replace(CONFIG, head_dim=24, hidden_size=96, qk_norm=False)
    with pytest.raises(CacheRefused, match="blocks of 32 numbers, and heads have 24"):
        make(random_weights(config), "q8_0", config)
    save_decoder(config, tmp_path)
    target = make(random_weights(CONFIG), "q8_0").spec
    draft = open_draft(target, None, LoadOptions(kv_cache_dtype="q8_0"), Budget(), str(tmp_path))
    assert "q8_0" not in draft.spec.kernels


def test_models_of_transformers_keep_their_own_cache(tmp_path: Path) -> None:
    from parlay.testing.checkpoints import random_model

    with pytest.raises(CacheRefused, match="runs through transformers"):
        models.load(random_model("gpt2"), LoadOptions(kv_cache_dtype="q8_0"))


def test_another_type_is_refused_with_the_list() -> None:
    with pytest.raises(UsageError, match="q8_0"):
        LoadOptions(kv_cache_dtype="fp8")
