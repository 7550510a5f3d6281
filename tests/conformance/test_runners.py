"""Every runner keeps the protocol: toys first, since all else is tested on them."""

from __future__ import annotations

import pytest

from parlay.testing.conformance import check_runner, default_stages
from parlay.testing.toys import ToyRunner
from parlay.types import Segment, Tree

STAGES = default_stages()


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES.keys())
@pytest.mark.parametrize("seed", [0, 1])
def test_logits_are_those_of_a_fresh_prefill(stage, seed):
    report = check_runner(stage.open_runner, stage.logits_of, noise_bound=stage.noise_bound, seed=seed)
    assert report.passed, str(report)
