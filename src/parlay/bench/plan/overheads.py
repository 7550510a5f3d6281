"""Measures the engine's time besides forwards, in plain steps, with wrong drafts, and with a draft model's drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from parlay.cost.calibrate import measure
from parlay.cost.fitting import nonnegative
from parlay.cost.measured import MeasuredCost
from parlay.cost.overheads import Overheads
from parlay.cost.roofline import ForwardShape
from parlay.drafters.draft_models.draft_model import DraftModel
from parlay.drafters.options import DraftModelOptions
from parlay.drafters.per_sequence import FromText
from parlay.drafters.resources import Resources
from parlay.engine import Engine
from parlay.router.policies import Fixed
from parlay.sampling.rules import SharedNoise
from parlay.types import (
    Draft,
    Drafter,
    Metrics,
    NoiseKey,
    Request,
    Runner,
    SamplingParams,
    SequenceView,
    Strategy,
    trees,
)

Clock = Callable[[], float]
_CASES = ((1, 0), (8, 0), (1, 4), (1, 16), (8, 4))
"""The measured cases: the number of sequences, and the number of nodes that each sequence drafts."""
_LEVELS = 4
_TOKENS = 40
_PROMPT = 3


class _WrongDrafter(FromText):
    """Drafts the first tokens of the vocabulary, which takes no time and is almost never right."""

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        return [trees.chain(range(budget), "wrong") for budget in budgets]


def engine_overheads(runner: Runner, clock: Clock = time.perf_counter) -> Overheads:
    """Measure the engine's seconds around ``runner`` in greedy decoding. The runner is also used as the draft model.

    Four of the overheads are fitted to the cases by non-negative least squares of relative errors. The other two follow
    from drafting with 1 and with 8 sequences.
    """
    seconds = [_engine_seconds(_decode(runner, _WrongDrafter(), batch, nodes, clock)) for batch, nodes in _CASES]
    counts = [[1, batch, batch * (nodes > 0), batch * nodes] for batch, nodes in _CASES]
    matrix = np.array(counts, dtype=float) / np.array(seconds)[:, None]
    step, sequence, drafted, node = map(float, nonnegative(matrix, np.ones(len(seconds))))
    alone, together = (_level(runner, batch, clock) for batch in (1, 8))
    each = max(0.0, (together - alone) / 7)
    return Overheads(
        step=step,
        sequence=sequence,
        drafted=drafted,
        node=node,
        level=max(0.0, alone - each),
        level_sequence=each,
    )


def _engine_seconds(metrics: Metrics) -> float:
    """Return the seconds of one step besides the target's forward, with the time of drafting."""
    return (metrics.overhead_seconds + metrics.draft_seconds) / metrics.steps


def _level(runner: Runner, batch: int, clock: Clock) -> float:
    """Return the seconds of one level of a draft besides the draft model's forward."""
    metrics = _decode(runner, _draft_model(runner), batch, _LEVELS, clock)
    work = ForwardShape(batch=batch, context=_PROMPT + _TOKENS // 2)
    (forward,) = measure(runner, [work], clock=clock)
    return max(0.0, metrics.draft_seconds / metrics.steps / _LEVELS - forward.seconds)


def _draft_model(runner: Runner) -> Drafter:
    """Make a drafter whose draft model is the runner."""
    resources = Resources(
        vocab_size=runner.spec.vocab_size, open_runner=lambda name: runner, default_draft=runner.spec.name
    )
    return DraftModel(resources, DraftModelOptions(min_p=0.0))


def _decode(runner: Runner, drafter: Drafter, batch: int, nodes: int, clock: Clock) -> Metrics:
    """Decode ``batch`` sequences that draft ``nodes`` nodes each.

    Returns the metrics of the sequence with the median time per step besides forwards.
    """
    engine = Engine(runner, MeasuredCost(), clock=clock)
    strategy = Strategy("overheads", (drafter,), SharedNoise(), Fixed(nodes))
    params = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True)
    for number in range(batch):
        prompt = (number, *range(1, _PROMPT))
        engine.add(Request(id=str(number), prompt=prompt, params=params, key=NoiseKey(0)), strategy)
    counted: list[Metrics] = []
    while not engine.idle:
        counted += [event.metrics for event in engine.step() if event.metrics is not None]
    return sorted(counted, key=_engine_seconds)[len(counted) // 2]
