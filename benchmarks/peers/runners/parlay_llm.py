"""Parlay itself, in a process of its own like its peers. A mode is a strategy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from benchmarks.figures.systems import Stopwatch, Timed
from benchmarks.peers.protocol import Decode, Task, serve
from parlay.llm import LLM
from parlay.requests import RequestOptions, TokensPrompt
from parlay.types import SamplingParams


class ParlayRunner:
    """Every request is a tenant of its own: none finds cached prefixes or learnt texts of an earlier round."""

    def __init__(self, task: Task) -> None:
        self._llm = LLM(task.model, draft_model=task.draft, dtype="bfloat16")
        self._tenants = itertools.count()

    def load(self, mode: str) -> Decode:
        def decode(ids: Sequence[int], most: int) -> Timed:
            params = SamplingParams(temperature=0, max_tokens=most)
            options = RequestOptions(strategy=mode, store=False, salt=str(next(self._tenants)))
            watch = Stopwatch()
            job = self._llm.job(TokensPrompt(prompt_token_ids=ids), params, options)
            (sample,) = job.samples
            self._llm.add(job)
            while not job.finished:
                for event in self._llm.engine.step():
                    watch.emit(job.event(sample, event).token_ids)
            metrics = job.output().outputs[0].metrics
            return watch.read(
                steps=metrics.steps,
                draft_tokens=metrics.draft_tokens,
                accepted_tokens=metrics.accepted_tokens,
                note=f"bf16, {self._llm.runner.spec.kernels}",
            )

        return decode


if __name__ == "__main__":
    serve(ParlayRunner, "parlay")
