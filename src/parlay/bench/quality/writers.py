"""Writers, which answer the tasks' problems: an oracle, or a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple, Protocol

from parlay.bench.quality.laws import Law, success
from parlay.bench.quality.oracle import ORACLE, Answer, Oracle
from parlay.bench.quality.tasks import EXAMPLES, TASKS, Problem, Task
from parlay.llm.llm import LLM
from parlay.sampling.selectors import FixedCount
from parlay.strategies.building import build_selector
from parlay.strategies.spelling import StrategySpec, parse
from parlay.types import SamplingParams

SEED = 0
FEW_ANSWERS = 16
"""If a problem has at most this many right answers, a random order's probability is computed for every seed."""


class Expected(NamedTuple):
    """The share of right answers that a law predicts, and the standard deviation of the measured share."""

    share: float
    sigma: float


class Writer(Protocol):
    """Answers problems. Rows of results get its ``name`` and ``temperature``."""

    @property
    def name(self) -> str: ...
    @property
    def temperature(self) -> float: ...

    def answers(self, task: Task, strategy: str) -> list[tuple[Problem, Answer]]: ...

    def expected(self, task: Task, strategy: str) -> Expected | None:
        """Return the predicted share of right answers; None if it is not known."""
        ...


@dataclass(frozen=True)
class OracleWriter:
    """Draws ``samples`` answers to each task from the distribution of the problems' right answers; see `laws`."""

    samples: int
    name: str = ORACLE
    temperature: float = 1.0

    def answers(self, task: Task, strategy: str) -> list[tuple[Problem, Answer]]:
        seeds = self._seeds(task)
        problems = [problem for problem, own in zip(_problems(task.name), seeds, strict=True) for _ in own]
        return list(zip(problems, Oracle(_laws(task.name)).write(strategy, dict(enumerate(seeds))), strict=True))

    def expected(self, task: Task, strategy: str) -> Expected | None:
        """Return the predicted share of right answers; None if it can't be computed.

        Strategies that decide one place at a time are always right. If k places are decided at a time and the task has
        a formula, the formula is used. Otherwise `success` sums over all right answers. It can't do that for selectors
        that open places again, and takes too long for random orders if problems have many answers.
        """
        spec = parse(strategy)
        selector, k = build_selector(spec), _fixed(spec)
        if selector is None or k == 1:
            return Expected(1.0, 0.0)
        if k is not None and task.closed is not None:
            return self._of([task.closed(k)] * self.samples)
        random = spec.settings["selector"] == "random"
        if selector.revokes or (random and any(len(law.answers_AP) > FEW_ANSWERS for law in _laws(task.name))):
            return None
        chances: list[float] = []
        for law, seeds in zip(_laws(task.name), self._seeds(task), strict=True):
            known = [success(law, selector, 1, seed) for seed in (seeds if random else seeds[:1])]
            chances += known if random else known * len(seeds)
        return self._of(chances)

    def _seeds(self, task: Task) -> list[range]:
        """Divide the seeds evenly among the task's problems. Some get none if there are fewer samples than problems."""
        starts = [self.samples * number // task.laws for number in range(task.laws + 1)]
        return [range(start, end) for start, end in pairwise(starts)]

    @staticmethod
    def _of(chances: Sequence[float]) -> Expected:
        variance = sum(max(0.0, chance * (1 - chance)) for chance in chances)
        return Expected(sum(chances) / len(chances), math.sqrt(variance) / len(chances))


@cache
def _problems(task: str) -> tuple[Problem, ...]:
    return tuple(TASKS[task].problems(TASKS[task].laws, SEED))


@cache
def _laws(task: str) -> tuple[Law, ...]:
    return tuple(Law(problem.answers) for problem in _problems(task))


def _fixed(spec: StrategySpec) -> int | None:
    """Return how many places the strategy decides per step; None if the number is not fixed."""
    selector = build_selector(spec)
    return selector.k if isinstance(selector, FixedCount) else None


@dataclass(frozen=True)
class ModelWriter:
    """Asks a model ``count`` problems of each task, each after ``examples`` solved ones, and decodes greedily.

    An answer ends with its first line.
    """

    llm: LLM
    name: str
    count: int
    max_tokens: int
    examples: int = EXAMPLES
    temperature: float = 0.0

    def check(self, task: Task) -> None:
        """Raise ValueError if a task's problems do not fit into the model's context."""
        longest = max(len(self.llm.job(text).samples[0].request.prompt) for text in self._prompts(task))
        if longest + self.max_tokens > self.llm.engine.longest:
            raise ValueError(
                f"task {task.name}: a prompt of {longest} tokens and a canvas of {self.max_tokens} do not fit the "
                f"context of {self.llm.engine.longest}: lower --max-tokens, or remove the task"
            )

    def answers(self, task: Task, strategy: str) -> list[tuple[Problem, Answer]]:
        params = SamplingParams(temperature=0, max_tokens=self.max_tokens, stop=["\n"])
        done = self.llm.generate(self._prompts(task), params, False, strategy=strategy, store=False)
        outputs = [each.outputs[0] for each in done]
        found = [Answer(one.text, len(one.token_ids), one.metrics.steps, one.exactness) for one in outputs]
        return list(zip(task.problems(self.count, SEED), found, strict=True))

    def expected(self, task: Task, strategy: str) -> None:
        """Return None: the distribution of a model's answers is not known."""

    def _prompts(self, task: Task) -> list[str]:
        return [task.prompt(problem, self.examples) for problem in task.problems(self.count, SEED)]
