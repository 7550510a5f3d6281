"""Plans and runs a measurement: which systems decode which workloads how often, always together with plain decoding.

Each round is stored when it is over, so that a run that was stopped can be continued.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

from parlay.bench.prepare import Preparation
from parlay.bench.records import OURS, PLAIN, Cell, Results, Row, System
from parlay.bench.rounds import Rounds, one_line
from parlay.bench.summary import plain_of, summary
from parlay.bench.wave import Decoder, Prepared, Waves
from parlay.bench.workloads import Workload
from parlay.llm.llm import LLM

CERTAIN = 0.02
"""No further rounds are measured once a ratio's relative standard error is at most this."""

logger = logging.getLogger(__name__)


class BenchSetting(NamedTuple):
    """The conditions of a comparison, the same for all its systems."""

    workload: str
    concurrency: int
    temperature: float
    context: int
    busy: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """A measurement to make. Plain decoding is always measured, and ``against`` besides Parlay's strategies.

    Each cell gets ``rounds`` rounds. It gets more, up to ``most_rounds``, while its ratio to plain decoding has a
    relative standard error above `CERTAIN`. In a round every system decodes all requests once, and again until
    ``seconds`` have passed.

    ``part`` names the measurement if a file holds several. While a cell is measured, ``busy`` other processes keep one
    core each busy. ``max_tokens`` limits all answers; None means each item's own limit. With ``keep_loops``, answers
    are not cut where they begin to repeat themselves.
    """

    part: str = ""
    model: str
    strategies: tuple[str, ...]
    workloads: tuple[Workload, ...]
    concurrency: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    contexts: tuple[int, ...] = (0,)
    busy: tuple[int, ...] = (0,)
    against: tuple[System, ...] = ()
    rounds: int = 3
    most_rounds: int = 0
    seconds: float = 0.0
    max_tokens: int | None = None
    keep_loops: bool = False

    @property
    def systems(self) -> tuple[System, ...]:
        """All systems, each once: plain decoding, then the strategies, then ``against``."""
        ours = (System(OURS, strategy) for strategy in (PLAIN, *self.strategies))
        return tuple(dict.fromkeys((*ours, *self.against)))

    def settings(self) -> Iterator[BenchSetting]:
        """Yield all combinations of conditions."""
        names = [workload.name for workload in self.workloads]
        for values in product(names, self.concurrency, self.temperatures, self.contexts, self.busy):
            yield BenchSetting(*values)

    def cells_of(self, setting: BenchSetting) -> list[Cell]:
        """Return the cells of one setting, one for each system."""
        return [
            Cell(part=self.part, engine=engine, model=self.model, strategy=strategy, **setting._asdict())
            for engine, strategy in self.systems
        ]

    def cells(self) -> Iterator[Cell]:
        """Yield all cells, in the order of the tables."""
        for setting in self.settings():
            yield from self.cells_of(setting)


def lacks(results: Results, plan: BenchPlan) -> bool:
    """Whether some cell has fewer rounds than the plan wants."""
    return any(len(results.of(cell)) < plan.rounds for cell in plan.cells())


class Bench:
    """Measures the rounds of a plan that are not yet in ``results``. It stores each round of a setting at once."""

    def __init__(
        self, llm: LLM, plan: BenchPlan, results: Results, decoders: Mapping[str, Decoder] | None = None
    ) -> None:
        """Prepare to measure. ``decoders`` are by engine; Parlay's is made if it is not among them."""
        self._plan = plan
        self._results = results
        self.waves = Waves(llm)
        self._rounds = Rounds({OURS: self.waves, **(decoders or {})}, plan.seconds)
        self._preparation = Preparation(llm, self.waves, plan.max_tokens, plan.keep_loops)
        self._prepared: dict[tuple[str, float, int], Prepared | Exception] = {}

    def narrow(self, strategies: tuple[str, ...], rounds: int) -> None:
        """Measure only these strategies from now on, until each of them has ``rounds`` rounds."""
        self._plan = replace(self._plan, strategies=strategies, rounds=rounds)

    @cached_property
    def left(self) -> int:
        """Number of rows that were certain to be measured when this was first read.

        Rounds that only make ratios more certain do not count.
        """
        return sum(
            len(self._lacking(setting, turn)) for setting in self._plan.settings() for turn in range(self._plan.rounds)
        )

    def run(self, tell: Callable[[int], object] = bool, *, ends: float = math.inf) -> None:
        """Measure round by round over all settings. After each, ``tell`` gets the number of new rows.

        Rounds that only make ratios more certain come last. No round after the first begins if it would end after
        ``ends`` (a time of `time.monotonic`) and takes as long as the last one.
        """
        took = 0.0
        for number in range(max(self._plan.rounds, self._plan.most_rounds)):
            began = time.monotonic()
            if took and began + took > ends:
                logger.info("%s: %d rounds are what there was time for", self._plan.model, number)
                return
            self.run_round(tell)
            took = time.monotonic() - began

    def run_round(self, tell: Callable[[int], object] = bool) -> None:
        """Measure one more round of each setting that lacks rounds."""
        for setting in self._plan.settings():
            self.run_setting(setting, tell)

    def run_setting(self, setting: BenchSetting, tell: Callable[[int], object] = bool) -> None:
        """Measure one more round of this setting, if it lacks rounds."""
        cells = self._lacking(setting)
        if cells:
            rows = self._measure(setting, self._next_round(cells[0]), cells)
            self._results.add(rows)
            tell(len(rows))

    def _lacking(self, setting: BenchSetting, turns: int = 0) -> list[Cell]:
        """Return the cells that still lack rounds after ``turns`` more; if any do, plain decoding comes first."""
        plain, *others = self._plan.cells_of(setting)
        lacking = [cell for cell in others if self._lacks(cell, turns)]
        return [plain, *lacking] if lacking or self._lacks(plain, turns) else []

    def _lacks(self, cell: Cell, turns: int) -> bool:
        count = len(self._results.of(cell)) + turns
        if count < self._plan.rounds or turns or count >= self._plan.most_rounds:
            return count < self._plan.rounds
        ratio = summary(self._results.of(cell), self._results.of(plain_of(cell))).ratio
        return ratio is not None and ratio.error > CERTAIN * ratio.median

    def _next_round(self, plain: Cell) -> int:
        """Return the number after all rounds of the setting, so that systems that join later have their own rounds."""
        beside = [cell for cell in self._results.cells if plain_of(cell) == plain]
        return max((row.round for cell in beside for row in self._results.of(cell)), default=-1) + 1

    def _measure(self, setting: BenchSetting, number: int, cells: list[Cell]) -> list[Row]:
        prepared = self._ready(setting)
        if isinstance(prepared, Exception):
            return [Row(cell=cell, round=number, error=one_line(prepared)) for cell in cells]
        logger.info("%s: round %d", ", ".join(filter(None, (cells[0].part, *map(str, setting)))), number + 1)
        return self._rounds.measure(cells, prepared, number)

    def _ready(self, setting: BenchSetting) -> Prepared | Exception:
        """Return the prepared workload, or the error of preparing it. All rounds and concurrencies share it."""
        key = (setting.workload, setting.temperature, setting.context)
        if key not in self._prepared:
            workload = next(each for each in self._plan.workloads if each.name == setting.workload)
            try:
                self._prepared[key] = self._preparation.prepare(workload, setting.temperature, setting.context)
            except Exception as error:  # the rows say so
                self._prepared[key] = error
        return self._prepared[key]
