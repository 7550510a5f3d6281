"""The facts of a finished request, for metrics, log and traces."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from parlay.llm.outputs import RequestOutput
from parlay.types import SamplingParams, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One prompt with its samples, whatever their end. Seconds are from the moment it went to the engine."""

    model: str
    output: RequestOutput
    params: SamplingParams
    seconds: float
    seconds_to_first: float
    """Until the first token."""
    client_id: str | None = None
    """The client's name for the request, in the header ``X-Request-Id``."""
    trace_parent: str | None = None
    """The client's place in a trace, in the header ``traceparent``."""
    owner: str = ""
    """The digest of its key; empty where the server has none."""
    store: bool = True
    """Whether others may learn from it."""
    tokenizer: Tokenizer | None = None
    """The model's."""
    ended: float = field(default_factory=time.time)
    """Unix seconds."""

    @property
    def prefill_seconds(self) -> float:
        """Steps until the first one that committed a token of the slowest sample."""
        return max(sample.metrics.prefill_seconds for sample in self.output.outputs)

    @property
    def decode_seconds(self) -> float:
        """Steps after those."""
        return max(sample.metrics.seconds - sample.metrics.prefill_seconds for sample in self.output.outputs)

    @property
    def queue_seconds(self) -> float:
        """The rest of the time: the request was with the engine, but in no step."""
        return max(0.0, self.seconds - self.prefill_seconds - self.decode_seconds)

    @property
    def tokens(self) -> int:
        """Tokens of all samples that were decoded here."""
        return sum(sample.metrics.completion_tokens for sample in self.output.outputs)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample, as far as they were decoded here."""
        return max(sample.metrics.completion_tokens for sample in self.output.outputs)

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time between two tokens after the first; None where there are fewer than two."""
        if self.longest < 2:
            return None
        return max(0.0, self.seconds - self.seconds_to_first) / (self.longest - 1)


Observer = Callable[[Finished], None]
