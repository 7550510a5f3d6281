"""The measurement: strategies on workloads, interleaved and repeated in one process, each round beside plain decoding.

In a round every strategy decodes the same requests, taking turns wave by wave; who begins changes. So a ratio to
plain decoding is one of the same minutes, and a slow minute of the machine spoils no strategy alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, islice, product
from typing import NamedTuple

from parlay.bench.burners import burning
from parlay.bench.loops import FEWEST_TOKENS
from parlay.bench.prepare import Preparation, Prepared, in_groups
from parlay.bench.records import PLAIN, Cell, Results, Row
from parlay.bench.summary import plain_of, summarise
from parlay.bench.tally import row_of
from parlay.bench.wave import Ask, Decoder, Ids, Wave, Waves
from parlay.bench.workloads import Workload
from parlay.energy import Meter
from parlay.llm import LLM
from parlay.types import ParlayError

CERTAIN = 0.02
"""Standard error of a ratio, as a share of it, at which no further round is measured."""


class Setting(NamedTuple):
    """What strategies are compared in."""

    workload: str
    concurrency: int
    temperature: float
    context: int
    busy: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure. Plain decoding is measured in any case. Each cell has ``rounds``, and up to ``most_rounds``
    while its ratio to plain decoding is uncertain by more than `CERTAIN`.

    In a round everyone goes through the requests once, or again and again until ``seconds`` have passed.
    While a cell is measured, ``busy`` other processes burn a core each.

    ``against`` names what is measured beside Parlay's strategies, by the decoders that `Bench` is given for them.

    ``max_tokens`` None takes what each item asks for. ``keep_loops``: answers go on where they repeat themselves.
    """

    model: str
    strategies: tuple[str, ...]
    workloads: tuple[Workload, ...]
    concurrency: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    contexts: tuple[int, ...] = (0,)
    busy: tuple[int, ...] = (0,)
    against: tuple[str, ...] = ()
    rounds: int = 3
    most_rounds: int = 0
    seconds: float = 0.0
    max_tokens: int | None = None
    keep_loops: bool = False

    @property
    def everyone(self) -> tuple[str, ...]:
        """The strategies, plain decoding first, each once, and what they are held against."""
        return tuple(dict.fromkeys((PLAIN, *self.strategies, *self.against)))

    def settings(self) -> Iterator[Setting]:
        names = [workload.name for workload in self.workloads]
        for values in product(names, self.concurrency, self.temperatures, self.contexts, self.busy):
            yield Setting(*values)

    def cell(self, setting: Setting, strategy: str) -> Cell:
        return Cell(model=self.model, strategy=strategy, **setting._asdict())

    def cells(self) -> Iterator[Cell]:
        """All of them, as tables list them."""
        for setting in self.settings():
            for strategy in self.everyone:
                yield self.cell(setting, strategy)


class Bench:
    """Measures what the results lack of a plan; each round of a setting is stored at once."""

    def __init__(
        self,
        llm: LLM,
        plan: Plan,
        results: Results,
        meter: Meter | None = None,
        others: Mapping[str, Decoder] | None = None,
    ) -> None:
        """``others`` decode what the plan is ``against``, by name."""
        self._plan = plan
        self._results = results
        self._decoders = {**dict.fromkeys(plan.everyone, Waves(llm, meter)), **(others or {})}
        self._preparation = Preparation(llm, Waves(llm), plan.max_tokens, plan.keep_loops)
        self._prepared: dict[tuple[str, float, int], Prepared | Exception] = {}
        self._warm: dict[tuple[str, int], str] = {}
        """What warming up a strategy at a concurrency raised; empty where it went well."""

    @cached_property
    def left(self) -> int:
        """Rows that were sure to be measured when this was first asked."""
        return sum(
            len(self._lacking(setting, turn)) for setting in self._plan.settings() for turn in range(self._plan.rounds)
        )

    def run(self, tell: Callable[[int], object] = bool) -> None:
        """Measure round by round over all settings; ``tell`` hears how many rows more there are. Rounds for the sake
        of certainty come last, and are in no count of those `left`."""
        for _ in range(max(self._plan.rounds, self._plan.most_rounds)):
            self.run_round(tell)

    def run_round(self, tell: Callable[[int], object] = bool) -> None:
        """Measure one round more of each setting that lacks some."""
        for setting in self._plan.settings():
            strategies = self._lacking(setting)
            if strategies:
                rows = self._measure(setting, self._next_round(setting), strategies)
                self._results.add(rows)
                tell(len(rows))

    def _lacking(self, setting: Setting, turns: int = 0) -> list[str]:
        """Who still lacks rounds after so many more turns, and plain decoding beside them."""
        lacking = [name for name in self._plan.everyone if self._lacks(self._plan.cell(setting, name), turns)]
        return list(dict.fromkeys((PLAIN, *lacking))) if lacking else []

    def _lacks(self, cell: Cell, turns: int) -> bool:
        count = len(self._results.of(cell)) + turns
        if count < self._plan.rounds or turns or count >= self._plan.most_rounds:
            return count < self._plan.rounds
        (summary,) = summarise((*self._results.of(plain_of(cell)), *self._results.of(cell)), [cell])
        return summary.ratio is not None and summary.ratio.error > CERTAIN * summary.ratio.median

    def _next_round(self, setting: Setting) -> int:
        """After all rows of the setting: a strategy that joins later meets plain decoding in a round of its own."""
        plain = self._plan.cell(setting, PLAIN)
        beside = [cell for cell in self._results.cells if plain_of(cell) == plain]
        return max((row.round for cell in beside for row in self._results.of(cell)), default=-1) + 1

    # ------------------------------------------------------------------------------------------------------ a round

    def _measure(self, setting: Setting, number: int, strategies: Sequence[str]) -> list[Row]:
        prepared = self._ready(setting)
        blank = [Row(cell=self._plan.cell(setting, name), round=number) for name in strategies]
        if isinstance(prepared, Exception):
            return [replace(row, error=one_line(prepared)) for row in blank]
        if not prepared.asks:
            return [replace(row, looped=prepared.looped, note=prepared.note) for row in blank]
        pairs = list(zip(prepared.asks, prepared.goals, strict=True))
        filled = list(islice(cycle(pairs), -(-len(pairs) // setting.concurrency) * setting.concurrency))
        failed = {name: error for name in strategies if (error := self._warm_up(name, setting, filled))}
        able = [name for name in strategies if name not in failed]
        with burning(setting.busy):
            waves = self._take_turns(setting, number, filled, able, failed)
        rows: list[Row] = []
        for row in blank:
            if row.cell.strategy in failed:
                rows.append(replace(row, error=failed[row.cell.strategy]))
                continue
            own = waves[row.cell.strategy]
            goals = list(islice(cycle(goal for _, goal in filled), setting.concurrency * len(own)))
            rows.append(row_of(row.cell, number, own, goals, looped=prepared.looped, note=prepared.note))
        return rows

    def _take_turns(
        self,
        setting: Setting,
        number: int,
        pairs: Sequence[tuple[Ask, Ids]],
        strategies: Sequence[str],
        failed: dict[str, str],
    ) -> dict[str, list[Wave]]:
        """Wave by wave, everyone, and again while there is time; who raises is out, and ``failed`` says why."""
        waves: dict[str, list[Wave]] = {name: [] for name in strategies}
        groups = list(in_groups([ask for ask, _ in pairs], setting.concurrency))
        ends = time.monotonic() + self._plan.seconds
        for turn, group in enumerate(cycle(groups)):
            if turn >= len(groups) and turn % len(groups) == 0 and time.monotonic() >= ends:
                break
            shift = (number + turn) % max(len(strategies), 1)
            for name in (*strategies[shift:], *strategies[:shift]):
                if name in failed:
                    continue
                try:
                    waves[name].append(self._decoders[name].decode(name, group, setting.temperature))
                except Exception as error:  # the row says so
                    failed[name] = one_line(error)
        return waves

    def _ready(self, setting: Setting) -> Prepared | Exception:
        """The workload, decoded plainly once for all rounds and concurrencies; or what went wrong in that."""
        key = (setting.workload, setting.temperature, setting.context)
        if key not in self._prepared:
            workload = next(each for each in self._plan.workloads if each.name == setting.workload)
            try:
                self._prepared[key] = self._preparation.prepare(workload, setting.temperature, setting.context)
            except Exception as error:  # the rows say so
                self._prepared[key] = error
        return self._prepared[key]

    def _warm_up(self, strategy: str, setting: Setting, pairs: Sequence[tuple[Ask, Ids]]) -> str:
        """Run a wave, the first time at this concurrency, a little and then whole; what raised is an error for good."""
        key = (strategy, setting.concurrency)
        if key not in self._warm:
            whole = [ask for ask, _ in pairs[: setting.concurrency]]
            begun = [replace(ask, most=min(ask.most, FEWEST_TOKENS)) for ask in whole]
            try:
                for asks in (begun, whole):
                    self._decoders[strategy].decode(strategy, asks, setting.temperature)
                self._warm[key] = ""
            except Exception as error:  # the row says so
                self._warm[key] = one_line(error)
        return self._warm[key]


def one_line(error: Exception) -> str:
    """The beginning of an error's message, and its type where the message was not written for users."""
    message = " ".join(str(error).split())
    return (message if isinstance(error, ParlayError) else f"{type(error).__name__}: {message}")[:300]
