"""What one decoding of a given text took, step by step, and what of that falls to a part of the text."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median
from typing import NamedTuple

from benchmarks.regimes.forced import ForcedRunner, Forward
from benchmarks.regimes.texts import Given, Stretch
from parlay.engine import Engine
from parlay.llm import LLM
from parlay.llm.input_processor import RequestOptions
from parlay.types import SamplingParams

STEPS = 12
"""Steps after a change in which the right choice may not be made yet."""
EARLY, LATE = "early", "late"
"""The tokens that the judged strategy commits in so many steps of a stretch, and those after them."""


class Step(NamedTuple):
    """One step of the engine: its forward, and what it took beside that."""

    forward: Forward
    rest: float

    @property
    def kind(self) -> tuple[bool, bool]:
        """Steps of one strategy that are alike in this take about as long beside the forward."""
        return self.forward.tapped, self.forward.rows > 1


@dataclass(frozen=True, slots=True)
class Trace:
    """How many tokens there were after each step, and when. The first step reads the prompt."""

    ends: Sequence[int]
    times: Sequence[float]
    steps: Sequence[Step]

    def at(self, tokens: int) -> float:
        """When there were so many. The tokens of one step count as if they came evenly within it."""
        step = bisect_left(self.ends, tokens)
        if step == 0 or self.ends[step] == tokens:
            return self.times[step]
        before, behind = self.ends[step - 1], self.ends[step]
        share = (tokens - before) / (behind - before)
        return self.times[step - 1] + share * (self.times[step] - self.times[step - 1])

    def after(self, tokens: int, steps: int) -> int:
        """Tokens after so many steps that began when there were ``tokens`` or more."""
        return self.ends[min(bisect_left(self.ends, tokens) + steps, len(self.ends) - 1)]

    def steps_in(self, start: int, end: int) -> int:
        """Steps that ended within this part."""
        return bisect_left(self.ends, end) - bisect_left(self.ends, start)


def smoothed(traces: Mapping[str, Trace]) -> dict[str, Trace]:
    """The same steps, by strategy, as if each took what such steps took in the median over all traces.

    Forwards are alike if they have as many rows. Beside the forward, steps of one strategy are alike if they are of one
    kind. So what chance and other processes do to single steps falls to no strategy.
    """
    forwards: dict[int, list[float]] = {}
    rests: dict[tuple[str, tuple[bool, bool]], list[float]] = {}
    for strategy, trace in traces.items():
        for step in trace.steps[1:]:
            forwards.setdefault(step.forward.rows, []).append(step.forward.seconds)
            rests.setdefault((strategy, step.kind), []).append(step.rest)
    usual = {rows: median(seconds) for rows, seconds in forwards.items()}
    beside = {kind: median(seconds) for kind, seconds in rests.items()}
    return {
        strategy: replace(
            trace,
            times=[
                *accumulate(
                    [usual[step.forward.rows] + beside[strategy, step.kind] for step in trace.steps[1:]], initial=0.0
                )
            ],
        )
        for strategy, trace in traces.items()
    }


def parts(stretch: Stretch, judged: Trace) -> Mapping[str, tuple[int, int]]:
    """Where the early and the late part of a stretch begin and end. What came with the prompt's step is left out."""
    start = max(stretch.start, judged.ends[0])
    change = min(judged.after(start, STEPS), stretch.end)
    return {EARLY: (start, change), LATE: (change, stretch.end)}


class Writer:
    """A model that writes given texts, whatever drafts for it. Prompts are computed anew, and nothing is stored."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._runner = llm, ForcedRunner(llm.runner)
        llm.engine = Engine(self._runner, llm.engine.cost)

    def write(self, strategy: str, text: Given, most: int | None = None) -> Trace:
        """The text, or its first ``most`` tokens. Raises ValueError where that fails, or something else comes out."""
        answer = text.answer[:most]
        params = SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True)
        options = RequestOptions(strategy=strategy, store=False)
        job = self._llm.job({"prompt_token_ids": text.prompt}, params, options)
        self._llm.reset_prefix_cache()
        self._runner.expect(text.prompt, answer)
        self._llm.add(job)
        tokens: list[int] = []
        ends: list[int] = []
        times: list[float] = []
        steps: list[Step] = []
        engine = self._llm.engine
        while not engine.idle:
            began = time.perf_counter()
            committed = [token for event in engine.step() for token in event.committed.tokens]
            if committed:
                tokens += committed
                ends.append(len(tokens))
                times.append(time.perf_counter())
                last = self._runner.last
                steps.append(Step(last, times[-1] - began - last.seconds))
        if tuple(tokens) != answer:
            raise ValueError(f"{strategy} wrote something else than text {text.name}")
        return Trace(ends, times, steps)
