"""A cache in blocks of eight bits keeps the promises of every other: fresh prefill, forks, cuts, strategies."""

from __future__ import annotations

import pytest
import torch

from parlay.compiled.library import NotLoaded, load
from parlay.models.config import DecoderConfig
from parlay.models.native import NativeRunner
from parlay.testing.conformance import check_runner, check_strategy, runner_stage
from parlay.testing.conformance.stage import Stage
from parlay.types import Runner
from tests.models.test_bits import FORMS, VOCAB, random_weights


@pytest.fixture(scope="module")
def stage() -> Stage:
    """A random model with windows, narrow and wide, and a draft that is often right: itself with another cache."""
    try:
        load()
    except NotLoaded as reason:
        pytest.skip(str(reason))
    config = DecoderConfig(
        architecture="test", vocab_size=VOCAB, num_layers=2, rms_norm_eps=1e-6, max_context=4096, qk_norm=True,
        layers=FORMS, logit_cap=5.0, hidden_size=64, intermediate_size=64, num_heads=2, num_kv_heads=1, head_dim=32,
    )  # fmt: skip
    weights = random_weights(config)

    def open_runner(capacity: int, cached: str = "q8_0") -> Runner:
        return NativeRunner(
            config, weights, dtype=torch.float32, device=torch.device("cpu"), max_tokens_cached=capacity,
            name="tiny", kv_cache_dtype=cached,
        )  # fmt: skip

    return runner_stage("native q8_0", open_runner, lambda: open_runner(8192, "auto"))


def test_logits_are_those_of_a_fresh_prefill(stage: Stage) -> None:
    report = check_runner(stage.open_runner, stage.logits_of)
    assert report.passed, str(report)


@pytest.mark.parametrize("spec", ["prompt-lookup", "draft-model:min_p=0,shape=tree,width=2"])
def test_strategies_write_the_tokens_of_plain_decoding(stage: Stage, spec: str) -> None:
    checks = ("greedy", "sampled", "continuing", "forks", "chunks", "preemption")
    report = check_strategy(spec, stages=[stage], checks=checks)
    assert report.passed, str(report)
