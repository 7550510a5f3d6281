"""Sources of answers to the tasks' problems: an oracle, or a model."""

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
"""Right answers up to which a random order's chance is summed for every seed."""


class Expected(NamedTuple):
    """Share of right answers that a law demands, and the standard deviation of a measured share."""

    share: float
    sigma: float


class Writer(Protocol):
    """Answers problems. ``name`` and ``temperature`` go into the rows."""

    @property
    def name(self) -> str: ...
    @property
    def temperature(self) -> float: ...

    def answers(self, task: Task, strategy: str) -> list[tuple[Problem, Answer]]: ...

    def expected(self, task: Task, strategy: str) -> Expected | None:
        """None where nothing is known of it."""
        ...


@dataclass(frozen=True)
class OracleWriter:
    """Draws ``samples`` answers to each task from the task's own law."""

    samples: int
    name: str = ORACLE
    temperature: float = 1.0

    def answers(self, task: Task, strategy: str) -> list[tuple[Problem, Answer]]:
        seeds = self._seeds(task)
        problems = [problem for problem, own in zip(_problems(task.name), seeds, strict=True) for _ in own]
        return list(zip(problems, Oracle(_laws(task.name)).write(strategy, dict(enumerate(seeds))), strict=True))

    def expected(self, task: Task, strategy: str) -> Expected | None:
        """None for selectors that open places again, and for random orders of what has many answers.

        A formula takes the place of the sum where places are decided k at a time. One at a time is always right.
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
        """The seeds of each of the task's problems: of none where there are fewer samples than problems."""
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
    """How many places the strategy decides per step, if that is fixed."""
    selector = build_selector(spec)
    return selector.k if isinstance(selector, FixedCount) else None


@dataclass(frozen=True)
class ModelWriter:
    """Asks a model ``count`` problems of each task, greedily, after solved ones. An answer ends with its line."""

    llm: LLM
    name: str
    count: int
    max_tokens: int
    examples: int = EXAMPLES
    temperature: float = 0.0

    def check(self, task: Task) -> None:
        """Raises ValueError where the problems of a task do not fit the model's context."""
        longest = max(len(self.llm.job(text).samples[0].request.prompt) for text in self._prompts(task))
        if longest + self.max_tokens > self.llm.engine.longest:
            raise ValueError(
                f"task {task.name}: a prompt of {longest} tokens and a canvas of {self.max_tokens} do not fit the "
                f"context of {self.llm.engine.longest}: lower --max-tokens, or leave the task out"
            )

    def answers(self, task: Task, strategy: str) -> list[tuple[Problem, Answer]]:
        params = SamplingParams(temperature=0, max_tokens=self.max_tokens, stop=["\n"])
        done = self.llm.generate(self._prompts(task), params, False, strategy=strategy, store=False)
        outputs = [each.outputs[0] for each in done]
        found = [Answer(one.text, len(one.token_ids), one.metrics.steps, one.exactness) for one in outputs]
        return list(zip(task.problems(self.count, SEED), found, strict=True))

    def expected(self, task: Task, strategy: str) -> None:
        """Nothing is known of the distribution of a model's answers."""

    def _prompts(self, task: Task) -> list[str]:
        return [task.prompt(problem, self.examples) for problem in task.problems(self.count, SEED)]
