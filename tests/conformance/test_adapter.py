"""Models that run through transformers pass the kit too: trees on key-value caches, replay on recurrent ones.

Numerical noise is far below the gaps between their logits, so no token may differ: nothing is excused.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from parlay.models.transformers_adapter.runner import AdapterRunner
from parlay.testing.checkpoints import random_model
from parlay.testing.conformance import KitLength, Stage, check_runner, run_check, runner_stage, subject_of

EFFORT = KitLength(tokens=32, draws=0)
MODELS = {
    "gpt2": (torch.float64, 1e-10),
    "gpt-neox": (torch.float64, 1e-10),
    "mamba": (torch.float32, 1e-4),
    "lfm2": (torch.float64, 1e-10),
    "qwen3.5": (torch.float32, 1e-4),
}
"""Tiny models with their dtype and noise bound. Recurrent states are in float32 whatever weights are in."""
CHECKS = ("greedy", "mixed", "continuing", "endings", "chunks", "forks", "preemption")
LEFT_OUT = {
    "gpt2": {"endings", "greedy"},
    "gpt-neox": {"endings", "chunks", "greedy", "continuing"},
    "mamba": {"greedy", "continuing"},
    "lfm2": {"greedy"},
    "qwen3.5": {"continuing", "endings", "chunks", "forks"},
}
"""Where a text ends inside a draft is the engine's work, and the toys show it on trees; what is cut back then is here
in every other check. Recurrent models, which must replay, keep it. Both models have one kind of cache, filled in chunks
in one way, and read again in one way. Qwen3.5's cache has two kinds of layers that the others have one each of: greedy
texts alone are written with it, those of the others' mixed batches are greedy and sampled."""
CASES = [(model, check) for model in MODELS for check in CHECKS if check not in LEFT_OUT.get(model, ())]


@cache
def stage(name: str) -> Stage:
    dtype, noise = MODELS[name]
    model, draft = (random_model(name, dtype=dtype, seed=seed) for seed in (0, 1))
    return runner_stage(
        name,
        lambda capacity: AdapterRunner(model, max_tokens_cached=capacity, name=name),
        lambda: AdapterRunner(draft, name=f"{name}-draft"),
        noise,
    )


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_a_fresh_prefill(model: str) -> None:
    report = check_runner(
        stage(model).open_runner, stage(model).logits_of, noise_bound=stage(model).noise_bound, steps=20
    )
    assert report.passed, str(report)


@pytest.mark.parametrize(("model", "check"), CASES)
def test_every_text_is_the_one_of_plain_decoding(model: str, check: str) -> None:
    finding = run_check(check, subject_of("union"), stage(model), EFFORT)
    assert finding.passed, str(finding)
    assert not finding.detail, "a difference was excused"
