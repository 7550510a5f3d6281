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
from parlay.compiled.build import LIBRARY
from parlay.compiled.library import SWITCH
from parlay.llm.vocabulary import open_draft
from parlay.models.choosing import CacheRefused
from parlay.models.compiled.layout import write_in_blocks
from parlay.models.config import DecoderConfig
from parlay.models.native import NativeRunner
from parlay.models.random_decoder import save_decoder
from parlay.options import LoadOptions, UsageError
from parlay.types import Features, Prefix, Segment, Tree
from tests.models.test_bits import KERNELS, random_weights, runs_here, text

CPU = torch.device("cpu")
CONFIG = DecoderConfig(
    architecture="test", vocab_size=97, num_layers=2, rms_norm_eps=1e-6, max_context=4096, qk_norm=True,
    hidden_size=128, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=64,
)  # fmt: skip

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the package was installed without a C compiler")


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
    return list(runner.store._live[0].table)


def hadamard() -> Tensor:
    made = torch.ones(1, 1)
    for _ in range(5):
        made = torch.kron(made, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    return made / 32**0.5


def stored(pages: list[Page], slot: int) -> tuple[Tensor, Tensor]:
    """The rounded key in blocks ``[layers, kv_heads, D/32, 32]``, and the value ``[layers, kv_heads, D]``."""
    key_codes, key_scales, value_codes, value_scales = pages[slot // BLOCK].row(slot % BLOCK)
    scales = [each.clone().view(torch.float16).float() for each in (key_scales, value_scales)]
    values = value_codes.clone().view(torch.int8).unflatten(-1, (-1, 32)) * scales[1]
    return (key_codes.flatten(-2).int() - 128) * scales[0], values.flatten(-2)


def plain(pages: list[Page], slot: int) -> Tensor:
    """The key and the value ``[layers, 2, kv_heads, D]`` of a cache of plain numbers."""
    key, value = pages[slot // BLOCK].row(slot % BLOCK)
    return torch.stack((key.flatten(-2), value), 1)


def attention(query_HD: Tensor, pages: list[Page], rows: int) -> Tensor:
    """Slow attention of layer 0 ``[heads * D]``: the query rounded in blocks, over the first rows of these pages."""
    query_HBI = (query_HD / 8).unflatten(-1, (-1, 32)) @ hadamard()
    step = query_HBI.abs().amax(-1, keepdim=True) / 127
    keys, values = zip(*(stored(pages, slot) for slot in range(rows)), strict=True)
    scores_HN = torch.einsum("hbi,nhbi->hn", (query_HBI / step).round() * step, torch.stack([key[0] for key in keys]))
    mixed_HD = torch.einsum("hn,nhd->hd", scores_HN.softmax(-1), torch.stack([value[0] for value in values]))
    return mixed_HD.flatten()


def test_pages_hold_each_row_rounded(weights: dict[str, Tensor], kernels: str) -> None:
    """Layer 0 of a float32 cache, rounded slowly, has the codes and scales of the cache in blocks, but for ties."""
    tokens = text(37)
    exact, blocks = (read(make(weights, cached), tokens) for cached in ("float32", "q8_0"))
    for slot in range(len(tokens)):
        wanted = Page(torch.zeros_like(blocks[0].memory[:, :, :, :1]), lanes=blocks[0].lanes)
        row = plain(exact, slot)
        write_in_blocks(wanted.row(0), row)
        for made, slow in zip(blocks[slot // BLOCK].row(slot % BLOCK), wanted.row(0), strict=True):
            assert (made[0].int() - slow[0].int()).abs().max() <= 1
        keys, values = stored(blocks, slot)
        assert ((keys[0] @ hadamard()).flatten(-2) - row[0, 0]).abs().max() < row[0, 0].abs().max() / 50
        assert (values[0] - row[0, 1]).abs().max() < row[0, 1].abs().max() / 200


@pytest.mark.parametrize("count", [5, 300])
def test_attention_is_that_over_the_rounded_rows(count: int, kernels: str) -> None:
    """A slow reference, behind less and more than a block of keys. Its query is a key: both have the same weights."""
    config = replace(CONFIG, num_heads=2)
    weights = random_weights(config)
    for name in ("proj", "norm"):
        weights[f"model.layers.0.self_attn.q_{name}.weight"] = weights[f"model.layers.0.self_attn.k_{name}.weight"]
    runners = [make(weights, cached, config) for cached in ("float32", "q8_0")]
    exact, rounded = (read(runner, text(count)) for runner in runners)
    taps = [
        runner.forward([Segment(0, (5,))], (0, 1), frozenset({("mlp", 0)})).taps for runner in runners
    ]  # what enters layer 1 then is what enters layer 0, and attention
    query_HD = plain(exact, count)[0, 0]
    expected = attention(query_HD, rounded, count + 1) @ weights["model.layers.0.self_attn.o_proj.weight"].T
    found = (taps[1][1] - taps[1][0])[0]
    assert (found - expected).abs().max() < 0.005 * expected.abs().max()


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


def test_a_draft_is_rounded_by_an_option_of_its_own_unless_it_is_in_few_bits_already(tmp_path: Path) -> None:
    """The target's option rounds the target alone."""
    save_decoder(CONFIG, tmp_path)
    target, kernels = make(random_weights(CONFIG), "auto").spec, list[str]()
    for load in (LoadOptions(quantize="int8"), LoadOptions(draft_quantize="int8")):
        kernels.append(open_draft(target, None, load, Budget(), str(tmp_path)).spec.kernels)
    assert ["int8" in each for each in kernels] == [False, True]
    packed = open_draft(target, None, LoadOptions(draft_quantize="int8"), Budget(), "smollm2-135m-draft")
    assert "int8" not in packed.spec.kernels


def test_models_of_transformers_keep_their_own_cache(tmp_path: Path) -> None:
    from parlay.testing.checkpoints import random_model

    with pytest.raises(CacheRefused, match="runs through transformers"):
        models.load(random_model("gpt2"), LoadOptions(kv_cache_dtype="q8_0"))


def test_another_type_is_refused_with_the_list() -> None:
    with pytest.raises(UsageError, match="q8_0"):
        LoadOptions(kv_cache_dtype="fp8")
