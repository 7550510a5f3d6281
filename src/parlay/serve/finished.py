"""The facts of a finished request, for metrics, logs and traces."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from parlay.llm.outputs import RequestOutput
from parlay.types import SamplingParams, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One prompt with all its samples, however it ended. Seconds count from when the engine got it."""

    model: str
    output: RequestOutput
    params: SamplingParams
    seconds: float
    seconds_to_first: float
    """Seconds until the first token."""
    request_id: str = ""
    """The request's id, from or for the header ``X-Request-Id``; all prompts of a request share it."""
    trace_parent: str | None = None
    """The client's trace context, from the header ``traceparent``."""
    owner: str = ""
    """The hash of the client's API key; empty if the server has no keys."""
    store: bool = True
    """Whether drafters and recordings may learn from it."""
    tokenizer: Tokenizer | None = None
    """The model's tokenizer."""
    ended: float = field(default_factory=time.time)
    """When it ended, in Unix seconds."""

    @property
    def prefill_seconds(self) -> float:
        """Seconds of the steps until the slowest sample's first token."""
        return max(sample.metrics.prefill_seconds for sample in self.output.outputs)

    @property
    def decode_seconds(self) -> float:
        """Seconds of the steps after the first token."""
        return max(sample.metrics.seconds - sample.metrics.prefill_seconds for sample in self.output.outputs)

    @property
    def queue_seconds(self) -> float:
        """Seconds that the request was with the engine, but in no step."""
        return max(0.0, self.seconds - self.prefill_seconds - self.decode_seconds)

    @property
    def tokens(self) -> int:
        """Tokens of all samples decoded by this server."""
        return sum(sample.metrics.completion_tokens for sample in self.output.outputs)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample, as far as this server decoded them."""
        return max(sample.metrics.completion_tokens for sample in self.output.outputs)

    @property
    def seconds_per_token(self) -> float | None:
        """Mean seconds between two tokens after the first; None for fewer than two."""
        if self.longest < 2:
            return None
        return max(0.0, self.seconds - self.seconds_to_first) / (self.longest - 1)


Observer = Callable[[Finished], None]
