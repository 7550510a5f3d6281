"""Every runner keeps the protocol: toys first, since all else is tested on them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from parlay.testing.conformance import check_runner, default_stages, toy_stage
from parlay.testing.conformance.stage import Stage
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


class Forgetful(ToyRunner):
    """Drops the last token of a long path."""

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        return super().keep(sequence, path[:-1] if len(path) > 2 else path) + (len(path) > 2)


class Leaky(ToyRunner):
    """Releases names, but not their cells."""

    def release(self, sequence: int) -> None:
        self._held.pop(sequence, None)


class Mixing(ToyRunner):
    """Finds prefixes whatever their salt."""

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        return super().open(sequence, tokens)


@pytest.mark.parametrize("kind", [Forgetful, Leaky, Mixing])
def test_a_broken_runner_is_found_out(kind: type[ToyRunner]) -> None:
    stage = toy_stage("toy")
    report = check_runner(lambda capacity: kind(stage.logits_of, 24, capacity=capacity), stage.logits_of)
    assert not report.passed
