"""Strategies against plain decoding on the built-in model, and what the formula says that they should reach.

Ideal seconds of a request are those of its forwards alone, at what a forward of so many rows costs here, and of its
drafting: F2 and F4 with measured acceptance (tokens over steps), measured v(rows, context) and measured drafting. What
the measured speed lacks of that is the engine's own time, and steps that are not like the mean step. Rows of probes
are in no count of drafted tokens, and so in no ideal.

Every request is decoded several times, so none may feed a store: it would find its own text there the next time. What
stores win from other requests is seen in the replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.figures.compare import Comparison
from benchmarks.figures.ours import PLAIN
from benchmarks.figures.prompts import KINDS, Prompt
from benchmarks.figures.results import Results
from benchmarks.figures.setup import Setup
from benchmarks.figures.systems import Stopwatch, System, Timed
from parlay.llm import LLM
from parlay.types import Metrics, SamplingParams


def speed(setup: Setup, results: Results, model: str, specs: Sequence[str]) -> None:
    """All strategies on every kind of text, interleaved, with plain decoding."""
    comparison = Comparison(
        part="speed",
        model=model,
        prompts={kind: drawn[: setup.scale.wide_prompts] for kind, drawn in setup.prompts(model, KINDS).items()},
        most_tokens=setup.scale.tokens,
        rounds=setup.scale.wide_rounds,
    )
    if comparison.pending(results):
        with setup.llm(model) as llm:
            comparison.run(results, priced(llm, PLAIN), [priced(llm, spec) for spec in specs if spec != PLAIN])


def priced(llm: LLM, spec: str) -> System:
    """A strategy as a system whose rows carry ``ideal_seconds`` and ``draft_seconds`` of the decoding."""

    def decode(prompt: Prompt, most: int) -> Timed:
        watch = Stopwatch()
        params = SamplingParams(temperature=0.0, max_tokens=most)
        stream = llm.stream({"prompt_token_ids": prompt.ids}, params, strategy=spec, store=False)
        for event in stream:
            watch.emit(event.token_ids)
        metrics = stream.output.outputs[0].metrics
        timed = watch.read(
            steps=metrics.steps, draft_tokens=metrics.draft_tokens, accepted_tokens=metrics.accepted_tokens
        )
        return replace(timed, values=prices(llm, metrics, len(prompt.ids)))

    return System(spec, decode)


def prices(llm: LLM, metrics: Metrics, prompt_tokens: int) -> dict[str, float]:
    """Forwards after the first step: plain ones of one row, and those that verify a draft, each of the mean size."""
    context = prompt_tokens + metrics.completion_tokens // 2
    forward = llm.engine.cost.forward
    drafted = min(metrics.draft_steps, metrics.steps - 1)
    rows = 1 + round(metrics.draft_tokens / metrics.draft_steps) if metrics.draft_steps else 1
    seconds = (metrics.steps - 1 - drafted) * forward(1, context) + drafted * forward(rows, context)
    return {
        "ideal_seconds": seconds + metrics.draft_seconds,
        "draft_seconds": metrics.draft_seconds,
        "rows": float(rows),
    }
