"""Ranks give plain decoding's text under every strategy, whatever is cut how; rows never depend on other rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from parlay import models
from parlay.cache import Spread
from parlay.cache.pages import STRIP
from parlay.models.choosing import choose_forward
from parlay.models.config import DecoderConfig
from parlay.models.loading import read_config
from parlay.models.part import Part
from parlay.models.random_decoder import save_decoder
from parlay.options import LoadOptions, RankOptions
from parlay.ranks.leader import Leader
from parlay.ranks.starting import lead
from parlay.testing.adapters import save_adapter
from parlay.testing.checkpoints import save_random
from parlay.testing.conformance import check_runner, check_strategy, runner_stage
from parlay.testing.conformance.stages import recomputed
from parlay.types import Features, Output, Runner, Segment, Tree
from tests.ranks.conftest import Crew

PROMPT = tuple(range(5, 45))
TREE = Tree((3, 9, 4, 1), (-1, -1, 0, 2))
SKIP = frozenset({("mlp", 1)})


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of two key heads."""
    folder = tmp_path_factory.mktemp("llama")
    save_random("llama", folder)
    return folder


@pytest.fixture(scope="session")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of five key heads."""
    sizes = {"hidden_size": 48, "intermediate_size": 112, "num_layers": 4, "num_heads": 10, "num_kv_heads": 5}
    return saved_llama(tmp_path_factory.mktemp("uneven"), head_dim=16, **sizes)


@pytest.fixture(scope="session")
def sinks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts, sinks, and windows in every second layer."""
    folder = tmp_path_factory.mktemp("sinks")
    save_random("gpt-oss", folder)
    return folder


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of one block of eight-bit codes."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return saved_llama(tmp_path_factory.mktemp("wide"), head_dim=32, **sizes)


def saved_llama(folder: Path, **sizes: int) -> Path:
    config = DecoderConfig(architecture="LlamaForCausalLM", vocab_size=64, rms_norm_eps=1e-6, max_context=256, **sizes)
    save_decoder(config, folder)
    return folder


def lead_ranks(
    crew: Crew,
    model: Path,
    capacity: int = 2048,
    *,
    tensor: int = 1,
    stages: int = 1,
    context: int = 1,
    dtype: str = "float32",
    cached: str = "auto",
    lora: str | None = None,
) -> Leader:
    options = RankOptions(tensor_parallel=tensor, pipeline_parallel=stages, context_parallel=context)
    load = LoadOptions(dtype=dtype, device="cpu", threads=1, kv_cache_dtype=cached, lora=lora)
    return lead(str(model), load, options, cache_tokens=capacity, start=crew.start, span=STRIP)


def alone(model: Path, dtype: str = "float32", cached: str = "auto", lora: str | None = None) -> Runner:
    load = LoadOptions(dtype=dtype, device="cpu", threads=1, kv_cache_dtype=cached, lora=lora)
    make = partial(choose_forward, part=Part(spread=Spread(span=STRIP)))
    return models.load(str(model), load, cache_tokens=2048, make_forward=make)


def run(runner: Runner) -> list[Output]:
    """A prompt in two chunks, then a tree with taps, a path of it kept, and rows that pass by a sub-layer.

    Then a tree over the end of a span, nodes that are added to it, and forwards of many rows, with logits and without.
    """
    outputs: list[Output] = []
    taps = range(min(3, runner.spec.num_layers) + 1)
    runner.open(1, PROMPT)
    runner.reserve(1, 64)
    outputs.append(runner.forward([Segment(1, PROMPT[:20], logits_from=20)]))
    runner.keep(1, [])
    outputs.append(runner.forward([Segment(1, PROMPT[20:], TREE, logits_from=19)], taps))
    runner.keep(1, [0, 2])
    outputs.append(runner.forward([Segment(1, (7,), logits_from=0)], (), SKIP))
    runner.fork(1, 2)
    runner.truncate(1, 30)
    runner.reserve(2, 64)
    outputs.append(runner.forward([Segment(2, (7, 8), TREE), Segment(1, (5, 6))]))
    assert runner.keep(2, [0, 2]) == 36
    runner.reserve(2, 80)
    text, wide = tuple(range(25)), Tree((1, 2, 3, 4, 5, 6, 7), (-1, -1, 0, 1, 2, 2, 5))
    outputs.append(runner.forward([Segment(2, text, Tree(wide.tokens[:5], wide.parents[:5]))]))
    outputs.append(runner.forward([Segment(2, text, wide, logits_from=30, base=30)]))
    assert runner.keep(2, [0, 2, 5, 6]) == 2 * STRIP + 1
    outputs.append(runner.forward([Segment(2, (1, 2))]))
    text = tuple(3 + row * row % 50 for row in range(133))
    runner.open(3, text, salt="long")
    runner.reserve(3, 133)
    outputs.append(runner.forward([Segment(3, text[:130], logits_from=130)]))
    runner.keep(3, [])
    outputs.append(runner.forward([Segment(3, text[130:])]))
    runner.truncate(3, 0)
    runner.reserve(3, 131)
    outputs.append(runner.forward([Segment(3, text[:131], logits_from=129), Segment(2, (1, 2))]))
    return outputs


@pytest.mark.parametrize(
    ("model", "stages", "dtype"), [("llama", 3, "float32"), ("llama", 2, "bfloat16"), ("uneven", 2, "float32")]
)
def test_stages_give_the_bits_of_one_process(
    request: pytest.FixtureRequest, crew: Crew, model: str, stages: int, dtype: str
) -> None:
    folder = request.getfixturevalue(model)
    for found, wanted in zip(
        run(lead_ranks(crew, folder, stages=stages, dtype=dtype)), run(alone(folder, dtype)), strict=True
    ):
        assert found.starts == wanted.starts
        assert torch.equal(found.logits_RV, wanted.logits_RV)
        assert found.taps.keys() == wanted.taps.keys()
        assert all(torch.equal(found.taps[tap], wanted.taps[tap]) for tap in wanted.taps)


def test_every_rank_merges_an_adapter_into_its_part(crew: Crew, llama: Path, tmp_path: Path) -> None:
    """Stages give the bits of one process."""
    lora = str(save_adapter(tmp_path, read_config(llama)))
    leader = lead_ranks(crew, llama, stages=2, lora=lora)
    for found, wanted, plain in zip(run(leader), run(alone(llama, lora=lora)), run(alone(llama)), strict=True):
        assert torch.equal(found.logits_RV, wanted.logits_RV)
        assert not len(plain.logits_RV) or not torch.equal(found.logits_RV, plain.logits_RV)


@pytest.mark.parametrize(
    ("tensor", "stages", "dtype"),
    [(2, 1, "float32"), (2, 1, "float64"), (2, 2, "float32"), (4, 1, "float32")],
    ids=["two shares", "two shares by torch", "two shares of two stages", "four shares"],
)
def test_shares_add_up_to_the_model(crew: Crew, uneven: Path, tensor: int, stages: int, dtype: str) -> None:
    """Sums of parts round differently from whole products, and by no more than that."""
    runner = lead_ranks(crew, uneven, tensor=tensor, stages=stages, dtype=dtype)
    for found, wanted in zip(run(runner), run(alone(uneven, dtype)), strict=True):
        torch.testing.assert_close(found.logits_RV, wanted.logits_RV, rtol=0, atol=1e-4)
        for tap in wanted.taps:
            torch.testing.assert_close(found.taps[tap], wanted.taps[tap], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("model", "dtype"), [("qwen2-moe", "float32"), ("gpt-oss", "float32"), ("gpt-oss", "float64")])
def test_shares_of_experts_add_up_to_the_model(crew: Crew, tmp_path: Path, model: str, dtype: str) -> None:
    """Each rank has some units of every expert, and of the one that all rows run; biases are added once."""
    save_random(model, tmp_path)
    ranks = lead_ranks(crew, tmp_path, tensor=2, dtype=dtype)
    for found, wanted in zip(run(ranks), run(alone(tmp_path, dtype)), strict=True):
        torch.testing.assert_close(found.logits_RV, wanted.logits_RV, rtol=0, atol=1e-4)
        for tap in wanted.taps:
            torch.testing.assert_close(found.taps[tap], wanted.taps[tap], rtol=0, atol=1e-4)


def test_ranks_that_share_experts_keep_what_a_runner_promises(crew: Crew, tmp_path: Path) -> None:
    save_random("gpt-oss", tmp_path)
    ranks = partial(lead_ranks, crew, tmp_path, tensor=2)
    report = check_runner(ranks, recomputed(ranks(8192)), steps=8)
    assert report.passed, report


def test_machines_that_share_no_memory_add_up_over_sockets(
    crew: Crew, uneven: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same bits as in memory: both add up in the order of ranks. So do those that share texts."""
    in_memory = run(lead_ranks(crew, uneven, tensor=3))
    monkeypatch.setattr("parlay.ranks.starting.machine_name", lambda: "another machine")
    for found, wanted in zip(run(lead_ranks(crew, uneven, tensor=3)), in_memory, strict=True):
        assert torch.equal(found.logits_RV, wanted.logits_RV)
    for found, wanted in zip(run(lead_ranks(crew, uneven, context=3)), run(alone(uneven)), strict=True):
        assert torch.equal(found.logits_RV, wanted.logits_RV)


@pytest.mark.parametrize(
    ("model", "context", "types"),
    [
        ("llama", 2, ("float32", "auto")),
        ("uneven", 3, ("bfloat16", "auto")),
        ("uneven", 4, ("float32", "auto")),
        ("sinks", 2, ("float32", "auto")),
        ("wide", 2, ("bfloat16", "q8_0")),
    ],
)
def test_ranks_that_share_texts_give_the_bits_of_one_process(
    request: pytest.FixtureRequest, crew: Crew, model: str, context: int, types: tuple[str, str]
) -> None:
    """Whichever spans each has, windows and sinks among what rows see, and trees over the ends of spans."""
    folder, (dtype, cached) = request.getfixturevalue(model), types
    found = run(lead_ranks(crew, folder, context=context, dtype=dtype, cached=cached))
    for own, wanted in zip(found, run(alone(folder, dtype, cached)), strict=True):
        assert torch.equal(own.logits_RV, wanted.logits_RV)
        assert all(torch.equal(own.taps[tap], wanted.taps[tap]) for tap in wanted.taps)


@pytest.mark.parametrize("over", ["memory", "sockets"])
def test_ranks_that_share_layers_and_texts_give_the_bits_of_those_that_share_layers(
    crew: Crew, uneven: Path, monkeypatch: pytest.MonkeyPatch, over: str
) -> None:
    """Five key heads on two, and each text on two groups of these."""
    wanted = run(lead_ranks(crew, uneven, tensor=2))
    if over == "sockets":
        monkeypatch.setattr("parlay.ranks.starting.machine_name", lambda: "another machine")
    for found, expected in zip(run(lead_ranks(crew, uneven, tensor=2, context=2)), wanted, strict=True):
        assert torch.equal(found.logits_RV, expected.logits_RV)
        assert all(torch.equal(found.taps[tap], expected.taps[tap]) for tap in expected.taps)


def test_ranks_that_share_layers_and_texts_keep_what_a_runner_promises(crew: Crew, uneven: Path) -> None:
    ranks = partial(lead_ranks, crew, uneven, tensor=2)
    report = check_runner(partial(ranks, context=2), recomputed(ranks(8192)), steps=6)
    assert report.passed, report


def test_ranks_that_share_texts_keep_what_a_runner_promises(crew: Crew, uneven: Path) -> None:
    report = check_runner(partial(lead_ranks, crew, uneven, context=2), recomputed(alone(uneven)), steps=20)
    assert report.passed, report


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (2, 2)])
def test_ranks_keep_what_a_runner_promises(crew: Crew, uneven: Path, tensor: int, stages: int) -> None:
    """Whatever happened to the caches of all ranks, logits have the bits of a fresh prefill by the same ranks."""
    ranks = partial(lead_ranks, crew, uneven, tensor=tensor, stages=stages)
    report = check_runner(ranks, recomputed(ranks(8192)), steps=12)
    assert report.passed, report


@pytest.mark.parametrize(
    ("split", "strategy", "checks"),
    [
        ((2, 1), "prompt-lookup:k=4", ["greedy", "mixed"]),
        ((2, 1), "token-recycling:k=6", ["sampled"]),
        ((2, 1), "eagle3", ["greedy", "sampled"]),
        ((2, 1), "medusa", ["greedy", "sampled"]),
        ((1, 2), "prompt-lookup:k=4", ["greedy"]),
        ((1, 2), "token-recycling:k=6", ["sampled"]),
        ((2, 2), "prompt-lookup:k=4", ["greedy"]),
        ((2, 2), "token-recycling:k=6", ["sampled"]),
    ],
)
def test_strategies_give_the_text_of_plain_decoding(
    crew: Crew, llama: Path, split: tuple[int, int], strategy: str, checks: Sequence[str]
) -> None:
    """Chains, trees and heads that read hidden states; greedy and sampled; on ranks that share layers, texts, both."""
    tensor, context = split
    ranks = partial(lead_ranks, crew, llama, tensor=tensor, context=context)
    stage = runner_stage("ranks", ranks, lambda: alone(llama))
    report = check_strategy(strategy, stages=[stage], checks=checks)
    assert report.passed, report


def test_what_one_rank_refuses_all_refuse(crew: Crew, llama: Path) -> None:
    """An error of the caller leaves all ranks as they were."""
    runner = lead_ranks(crew, llama, tensor=2)
    runner.open(1, PROMPT)
    runner.reserve(1, 64)
    with pytest.raises(ValueError, match="vocabulary"):
        runner.forward([Segment(1, (1000,))])
    with pytest.raises(ValueError, match="features"):
        runner.forward([Segment(1, (1,), features=Features(torch.zeros(1, 32)))])
    first = runner.forward([Segment(1, PROMPT)]).logits_RV
    runner.open(2, PROMPT, salt="other")
    runner.reserve(2, 64)
    assert torch.equal(runner.forward([Segment(2, PROMPT)]).logits_RV, first)


def test_ranks_end_when_their_leader_closes(crew: Crew, llama: Path) -> None:
    runner = lead_ranks(crew, llama, tensor=2, stages=2)
    processes = {crew.said()[0] for _ in range(3)}
    runner.close()
    assert {crew.said() for _ in range(3)} == {(process, "is done") for process in processes}


def test_kernels_are_others_where_the_number_of_ranks_changes_bits_and_nowhere_else(crew: Crew, uneven: Path) -> None:
    """A gateway lets a stream go on at another server by this name."""
    plain = alone(uneven).spec.kernels
    assert lead_ranks(crew, uneven, stages=2).spec.kernels == plain
    assert "2 ranks share each layer" in lead_ranks(crew, uneven, tensor=2, stages=2).spec.kernels
    assert "3 ranks share each layer" in lead_ranks(crew, uneven, tensor=3).spec.kernels
