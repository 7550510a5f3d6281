"""What `LLM` returns: vLLM's result shape, with the strategy, its exactness and the engine's metrics beside it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from parlay.types import Exactness, FinishReason, Metrics, TokenLogprobs


@dataclass(frozen=True, slots=True)
class PredictionUse:
    """What its prediction was worth to one sample, in tokens; over several samples, add them up.

    ``accepted``: tokens of the output that were drafted from the prediction. A strategy that copies from it as from any
    other text accepts none. ``rejected``: the length of the prediction less ``accepted``, and 0 if a part was copied
    twice. The one token per step that the target writes itself does not count as accepted. So a prediction that is the
    whole answer has as many rejected tokens as there were steps, or fewer.
    """

    accepted: int
    rejected: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One sample. ``seed`` reproduces it (with ``index`` as the sample index), whatever the strategy."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    strategy: str
    exactness: Exactness
    seed: int
    sources: tuple[str, ...]
    """Per token: the drafter that proposed it, or ``target``."""
    metrics: Metrics
    error: str | None = None
    prediction: PredictionUse | None = None
    """None where the request came without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One prompt and its samples."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    outputs: tuple[CompletionOutput, ...]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of text and the source of the token it came with."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """What one step added to one sample. The last event of the last sample carries the whole output."""

    index: int
    pieces: tuple[Piece, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None

    @property
    def text(self) -> str:
        return "".join([piece.text for piece in self.pieces])


def joined(events: Collection[StreamEvent]) -> list[StreamEvent]:
    """The same news with one event for each sample, in the order of their last events."""
    if len(events) < 2:
        return list(events)
    by_sample: dict[int, list[StreamEvent]] = {}
    for event in events:
        own = by_sample.pop(event.index, [])
        own.append(event)
        by_sample[event.index] = own  # now the last
    return [_one(own) for own in by_sample.values()]


def _one(events: list[StreamEvent]) -> StreamEvent:
    pieces = tuple(piece for event in events for piece in event.pieces)
    token_ids = tuple(token for event in events for token in event.token_ids)
    return StreamEvent(events[0].index, pieces, token_ids, events[-1].finish_reason, events[-1].output)
