"""What a drafter is given in tests that drive it by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parlay.types import NoiseKey, Request, Runner, SamplingParams

REQUEST = Request(id="r", prompt=(0,), params=SamplingParams(), key=NoiseKey(0))


@dataclass
class Sight:
    """A `SequenceView` whose tokens the test sets."""

    sequence: int
    tokens: Sequence[int]
    request: Request = REQUEST
    prompt_length: int = 1
    layers: None = None


def no_runner(name: str) -> Runner:
    """For drafters that open no model."""
    raise AssertionError(f"{name} was opened")
