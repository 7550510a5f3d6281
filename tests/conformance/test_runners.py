"""Every runner keeps the protocol: toys first, since all else is tested on them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from parlay.cache import BLOCK, RecentShape
from parlay.models import forward
from parlay.models.loading import load_weights, read_config
from parlay.models.native import NativeRunner
from parlay.testing.checkpoints import save_random
from parlay.testing.conformance import (
    KitLength,
    check_runner,
    default_stages,
    run_check,
    runner_stage,
    subject_of,
    toy_stage,
)
from parlay.testing.conformance.stage import Stage
from parlay.testing.conformance.stages import recomputed
from parlay.testing.toys import ToyRunner

STAGES = default_stages()


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES.keys())
def test_logits_are_those_of_a_fresh_prefill(stage: Stage) -> None:
    report = check_runner(stage.open_runner, stage.logits_of, noise_bound=stage.noise_bound)
    assert report.passed, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES.keys())
def test_logits_stay_those_of_a_fresh_prefill_on_long_walks(stage: Stage, seed: int) -> None:
    report = check_runner(stage.open_runner, stage.logits_of, noise_bound=stage.noise_bound, steps=300, seed=seed)
    assert report.passed, str(report)


@pytest.mark.parametrize("name", ["gemma3", "gemma4-e", "gpt-oss"])
def test_windows_and_experts_keep_the_protocol(name: str, tmp_path: Path) -> None:
    """Text by text and tree by tree each row has the very bits that it has in a fresh prefill."""
    save_random(name, tmp_path)
    config = read_config(tmp_path)
    weights = load_weights(tmp_path, config)

    def open_runner(capacity: int) -> NativeRunner:
        cpu = torch.device("cpu")
        return NativeRunner(config, weights, dtype=torch.float32, device=cpu, max_tokens_cached=capacity)

    report = check_runner(open_runner, recomputed(open_runner(1024)), steps=25)
    assert report.passed, str(report)


@pytest.mark.parametrize("name", ["gemma3", "gemma4-e"])
def test_layers_that_forget_early_keep_the_protocol(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And write the text of plain decoding, with drafts, under preemption: keys stay for one page before the window."""
    save_random(name, tmp_path)
    config = read_config(tmp_path)
    weights = load_weights(tmp_path, config)

    def open_runner(capacity: int) -> NativeRunner:
        cpu = torch.device("cpu")
        return NativeRunner(config, weights, dtype=torch.float32, device=cpu, max_tokens_cached=capacity)

    judge = recomputed(open_runner(1024))
    monkeypatch.setattr(forward, "most_pages", lambda window: 1)
    monkeypatch.setattr(forward, "RecentShape", partial(RecentShape, margin=BLOCK, ahead=0))
    assert open_runner(1024).store._recent is not None
    report = check_runner(open_runner, judge, steps=40)
    assert report.passed, str(report)
    stage = runner_stage("forgetting", open_runner, lambda: open_runner(1024))
    for check in ("mixed", "preemption"):
        finding = run_check(check, subject_of("union"), stage, KitLength(tokens=32, draws=0))
        assert finding.passed, str(finding)


class Forgetful(ToyRunner):
    """Drops the last token of a long path."""

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        return super().keep(sequence, path[:-1] if len(path) > 2 else path) + (len(path) > 2)


class Leaky(ToyRunner):
    """Releases names, but not their cells."""

    def release(self, sequence: int) -> None:
        self._states.pop(sequence, None)


class Mixing(ToyRunner):
    """Finds prefixes whatever their salt."""

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        return super().open(sequence, tokens)


@pytest.mark.parametrize("kind", [Forgetful, Leaky, Mixing])
def test_a_broken_runner_is_found_out(kind: type[ToyRunner]) -> None:
    stage = toy_stage("toy")
    report = check_runner(lambda capacity: kind(stage.logits_of, 24, capacity=capacity), stage.logits_of)
    assert not report.passed
