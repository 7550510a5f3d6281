"""Times strategies against plain decoding on SmolLM2, and computes the speed that the measured costs would allow.

The ideal seconds of a request are those of its forwards, at the measured cost of their rows and context, and of its
drafting. The measured speed is lower by the engine's own time, and differs where steps are unlike the mean step. Rows
of probes are not counted as drafted tokens, so the ideal leaves them out.

Every request is decoded several times, so none may feed a store: it would find its own text there the next time. The
replays show what stores gain from other requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.setup import Setup
from parlay.bench.records import OURS, PLAIN, Results
from parlay.bench.runner import Bench, BenchPlan, lacks
from parlay.bench.wave import Ask, Wave, Waves
from parlay.llm import LLM
from parlay.types import Metrics

PART = "speed"
IDEAL, DRAFT_STEPS = "ideal_seconds", "draft_steps"
"""Names of values in rows: the ideal seconds of decoding, and the number of steps that verified a draft."""


def speed(setup: Setup, results: Results, model: str, specs: Sequence[str]) -> None:
    """Measure all strategies and plain decoding on every kind of text, interleaved."""
    count = setup.scale.wide_prompts
    drawn = setup.workloads(model)
    plan = BenchPlan(
        part=PART,
        model=model,
        strategies=tuple(spec for spec in specs if spec != PLAIN),
        workloads=tuple(replace(each, items=each.items[:count]) for each in drawn),
        rounds=setup.scale.wide_rounds,
        max_tokens=setup.scale.tokens,
    )
    if lacks(results, plan):
        with setup.llm(model) as llm:
            Bench(llm, plan, results, {OURS: Priced(llm)}).run()


class Priced:
    """Implements `Decoder` with Parlay. Its waves carry the ideal seconds of their decoding."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._waves = Waves(llm)

    def decode(self, strategy: str, asks: Sequence[Ask], temperature: float) -> Wave:
        """Decode as `Decoder` says."""
        wave = self._waves.decode(strategy, asks, temperature)
        metrics = [answer.metrics for answer in wave.answers]
        values = {
            IDEAL: sum(ideal_seconds(self._llm, each) for each in metrics),
            DRAFT_STEPS: float(sum(each.draft_steps for each in metrics)),
        }
        return replace(wave, values=values)


def ideal_seconds(llm: LLM, metrics: Metrics) -> float:
    """Return the ideal seconds of a request: its drafting, and its forwards after the first.

    A forward has one row, or it verifies a draft of the mean size.
    """
    context = metrics.prompt_tokens + metrics.completion_tokens // 2
    forward = llm.engine.cost.forward
    drafted = min(metrics.draft_steps, metrics.steps - 1)
    rows = 1 + round(metrics.draft_tokens / metrics.draft_steps) if metrics.draft_steps else 1
    seconds = (metrics.steps - 1 - drafted) * forward(1, context) + drafted * forward(rows, context)
    return seconds + metrics.draft_seconds
