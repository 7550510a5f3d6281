"""Helpers for tests of the engine: a toy target, a drafter that knows its answers, and an engine with both."""

from __future__ import annotations

from collections.abc import Iterable

from parlay.engine import Engine, Limits
from parlay.router.policies import Plain
from parlay.sampling.rules import SharedNoise
from parlay.testing import toy_drafters
from parlay.testing.conformance.stage import Steady
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import Event, Strategy

VOCAB = 16
LOGITS = RandomLogits(VOCAB, seed=3)
ANSWER = toy_drafters.answer_by(LOGITS)
PLAIN = Strategy("none", (), SharedNoise(), Plain())


def engine(runner: ToyRunner | None = None, **limits: int) -> Engine:
    """Make an engine, with a toy runner unless another is given."""
    return Engine(runner or ToyRunner(LOGITS, VOCAB), Steady(), Limits(**limits))


def committed(events: Iterable[Event]) -> list[int]:
    """Return the tokens of these events, in order."""
    return [one.token for event in events for one in event.committed]
