"""Parlay as a system under test, through the API that users call."""

from __future__ import annotations

from benchmarks.figures.prompts import Prompt
from benchmarks.figures.systems import Stopwatch, System, Timed
from parlay.llm import LLM
from parlay.types import SamplingParams

PLAIN = "none"


def parlay(llm: LLM, strategy: str) -> System:
    """The system named ``parlay STRATEGY``."""

    def decode(prompt: Prompt, most: int) -> Timed:
        params = SamplingParams(temperature=0.0, max_tokens=most)
        watch = Stopwatch()
        stream = llm.stream({"prompt_token_ids": prompt.ids}, params, strategy=strategy)
        for event in stream:
            watch.emit(event.token_ids)
        metrics = stream.output.outputs[0].metrics
        return watch.read(
            steps=metrics.steps,
            draft_tokens=metrics.draft_tokens,
            accepted_tokens=metrics.accepted_tokens,
            note=llm.runner.spec.dtype,
        )

    return System(f"parlay {strategy}", decode)
