"""A sequence as policies see it, for tests."""

from __future__ import annotations

from dataclasses import dataclass, field

from parlay.types import NoiseKey, Request, SamplingParams

REQUEST = Request(id="r", prompt=(1,), params=SamplingParams(max_tokens=None), key=NoiseKey(0))


@dataclass
class SequenceView:
    """A `SequenceView` whose tokens the test sets."""

    sequence: int
    request: Request = REQUEST
    tokens: list[int] = field(default_factory=lambda: [1])
    prompt_length: int = 1
