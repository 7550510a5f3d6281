"""Recorded answers under one strategy, and what was counted; seconds mean nothing here, except those of drafting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parlay.bench.replay.decode import Replay
from parlay.bench.replay.tokens import Recorded, Tokens


@dataclass(frozen=True, slots=True)
class Replayed:
    """What one strategy made of a set of answers; ``propose_seconds`` is what drafting took in the mean step."""

    tokens: int
    steps: int
    draft_tokens: int
    accepted_tokens: int
    propose_seconds: float
    same: bool


def replay(spec: str, records: Sequence[Recorded], tokens: Tokens, measured_from: int = 0) -> Replayed:
    """Decode the answers one after another; those before ``measured_from`` only teach what learns across requests.

    Raises ValueError for a strategy that can't be replayed.
    """
    run = Replay(spec, tokens)
    done = [run.answer(number, record) for number, record in enumerate(records)]
    total = [one.metrics for one in done[measured_from:]]
    steps = sum(one.steps for one in total)
    return Replayed(
        tokens=sum(one.completion_tokens for one in total),
        steps=steps,
        draft_tokens=sum(one.draft_tokens for one in total),
        accepted_tokens=sum(one.accepted_tokens for one in total),
        propose_seconds=sum(one.draft_seconds for one in total) / max(1, steps),
        same=all(one.tokens == record.output for one, record in zip(done, records, strict=True)),
    )
