"""Finds the quickest strategy for a user's own prompts: a race in which plain decoding runs beside all others.

Each prompt is a workload of its own, so every strategy is compared with plain decoding of the same prompt in the same
seconds. A strategy whose interval lies below the best one's leaves the race. All ends when time is over; answers are
so short that the first prompt with two strategies ends before that, if they have the fewest tokens at the least.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import geometric_mean

from parlay.bench.loops import FEWEST_TOKENS
from parlay.bench.prepare import Preparation
from parlay.bench.records import PLAIN, Results, Row
from parlay.bench.runner import Bench, BenchPlan, BenchSetting
from parlay.bench.summary import Interval, measured, ratio, whole_rate
from parlay.bench.wave import OutOfTime, Waves
from parlay.bench.workloads import Item, Workload
from parlay.llm.llm import LLM
from parlay.strategies.catalogue import catalogue
from parlay.strategies.entry import DEFAULT_STRATEGY
from parlay.system.terminal import counted
from parlay.types import Exactness

FINALISTS = 4
"""So many strategies are measured again after the first round."""
FEWEST = 3
"""Prompts after which the first strategies may leave the race."""
ENOUGH = 5
"""Prompts without which nothing is recommended."""
EQUAL = 1.02
"""A strategy less than so many times as fast as another counts as equal to it."""
_FIRST_SHARE = 0.4
"""The first prompt, which warms every strategy up, may take this share of the time."""
_FIRST_RUNS = 2.3
"""What the first prompt costs a strategy, in runs: a little, the whole answer, and the whole answer timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A race to run: ``strategies``, the most promising first, on ``prompts``, until ``minutes`` after ``began``.

    ``began`` is of `time.monotonic`, so that what the caller did before, such as to load the model, counts too.
    The first round goes through all prompts, while there is time; further ones, up to ``rounds``, are for the best.
    """

    strategies: tuple[str, ...]
    prompts: tuple[Item, ...]
    minutes: float = 5.0
    rounds: int = 3
    max_tokens: int = 128
    temperature: float = 0.0
    began: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy as it was measured on so many ``prompts``, in at most so many ``rounds``.

    ``speed`` is how many times as fast as plain decoding, the geometric mean over prompts; None where nothing was
    timed. ``low`` and ``high`` bound its 95 % interval, in a result that for all strategies together; None for a single
    prompt. ``whole`` is the speed with the time before the first token, in which a model that drafts reads the prompt
    too. ``same`` texts of ``of`` were those of plain decoding.
    """

    strategy: str
    prompts: int
    rounds: int
    tokens_per_second: float
    speed: float | None
    low: float | None
    high: float | None
    tokens_per_step: float
    same: int
    of: int
    whole: float | None = None
    recommended: bool = False
    error: str = ""

    @property
    def sound(self) -> bool:
        """Whether it was timed and gave the very texts of plain decoding."""
        return self.speed is not None and not self.error and 0 < self.of == self.same


@dataclass(frozen=True, slots=True)
class TrialResult:
    """All candidates, the best first; ``plain`` in tokens per second; what there was no time for at all.

    ``unreached`` prompts are those that came too late to be decoded.
    """

    plain: float
    candidates: tuple[Candidate, ...]
    left_out: tuple[str, ...] = ()
    unreached: int = 0

    @property
    def best(self) -> Candidate | None:
        """The recommended candidate; None where none is surely quicker than plain decoding."""
        return next((each for each in self.candidates if each.recommended), None)

    @property
    def lacking(self) -> int:
        """How many prompts more a recommendation needs."""
        return max(0, ENOUGH - max((each.prompts for each in self.candidates if each.sound), default=0))


def without_training(llm: LLM) -> tuple[str, ...]:
    """The exact strategies that work for the model by their name alone and were not trained, those of `auto` first."""
    return _exact(llm, "none")


def usual_strategies(llm: LLM, own: Sequence[str] = ()) -> tuple[str, ...]:
    """All that is worth a try: the default, a draft model where there is one, the user's ``own``, and all the rest."""
    drafting = _exact(llm, "a small model")
    return tuple(dict.fromkeys((DEFAULT_STRATEGY, *drafting[:1], *own, *without_training(llm), *drafting[1:])))


def _exact(llm: LLM, training: str) -> tuple[str, ...]:
    entries = catalogue()
    kept = (Exactness.BITS, Exactness.SEED)
    offered = [(name, entries[name]) for name in llm.offered()]
    found = sorted(offered, key=lambda each: (each[1].beside, -each[1].arm))
    return tuple(
        name for name, entry in found if entry.training == training and entry.factory and entry.exactness in kept
    )


def run(
    llm: LLM, trial: Trial, results: Results, say: Callable[[str], object], step: Callable[[str], object]
) -> TrialResult:
    """Race the strategies. ``say`` gets what is announced, ``step`` a note after each prompt.

    Raises ValueError where no prompt leaves anything to time.
    """
    return _Race(llm, trial, results).run(say, step)


class _Race:
    """One trial under way."""

    def __init__(self, llm: LLM, trial: Trial, results: Results) -> None:
        self._trial = trial
        self._results = results
        self._ends = trial.began + 60 * trial.minutes
        plan = BenchPlan(
            model=llm.runner.spec.name,
            strategies=trial.strategies,
            workloads=tuple(Workload(f"prompt {place}", (item,)) for place, item in enumerate(trial.prompts, start=1)),
            temperatures=(trial.temperature,),
            rounds=1,
            max_tokens=trial.max_tokens,
        )
        self._plan = replace(plan, max_tokens=self._longest(llm, plan))
        self._settings = list(self._plan.settings())
        self._bench = Bench(llm, self._plan, results)

    def _longest(self, llm: LLM, plan: BenchPlan) -> int:
        """The most tokens of an answer for which there is time, by the pace of a short plain answer."""
        began = time.monotonic()
        with suppress(Exception):  # what is wrong with the first prompt its rows say
            Preparation(llm, Waves(llm), FEWEST_TOKENS, keep_loops=True).prepare(
                plan.workloads[0], self._trial.temperature, 0
            )
        pace = (time.monotonic() - began) / FEWEST_TOKENS
        most = _FIRST_SHARE * max(0.0, self._ends - began) / ((1 + 3 * _FIRST_RUNS) * pace)
        return max(min(self._trial.max_tokens, int(most)), min(self._trial.max_tokens, FEWEST_TOKENS))

    def run(self, say: Callable[[str], object], step: Callable[[str], object]) -> TrialResult:
        most = self._plan.max_tokens
        why = f" (not {self._trial.max_tokens}, for want of time)" if most != self._trial.max_tokens else ""
        say(f"timing plain decoding of a prompt, {most} tokens at most{why}")
        seconds = self._time_plain()
        field = self._affordable(seconds)
        left_out = self._trial.strategies[len(field) :]
        count = len(self._settings)
        say(
            f"{len(field)} strategies on {counted(count, 'prompt')}: each takes about "
            f"{(count + _FIRST_RUNS - 1) * seconds:.0f} s to try once (plain decoding {seconds:.1f} s a prompt); at "
            f"most {self._trial.minutes:g} minute{'s' * (self._trial.minutes != 1)}, of which "
            f"{time.monotonic() - self._trial.began:.0f} s are over"
        )
        with suppress(KeyboardInterrupt, OutOfTime):  # what was measured until then is shown
            self._rounds(field, step)
        return self._result(left_out)

    def _rounds(self, field: tuple[str, ...], step: Callable[[str], object]) -> None:
        """All prompts once with the field, then again with the best, until time is over."""
        took = 0.0
        for number in range(self._trial.rounds):
            field = field if number == 0 else tuple(each.strategy for each in self._standing(field)[:FINALISTS])
            for setting in self._settings:
                began = time.monotonic()
                if not field or (took and began + took > self._ends):
                    return
                self._bench.narrow(field, number + 1)
                self._bench.waves.ends = self._ends if took else math.inf
                self._bench.run_setting(setting)
                field = self._left(field)
                step(self._note(field))
                took = (time.monotonic() - began) / (1 if took else _FIRST_RUNS)

    def _time_plain(self) -> float:
        """Seconds that plain decoding takes for the first prompt that can be timed, at which the race begins."""
        self._bench.narrow((), 1)
        for place, setting in enumerate(self._settings):
            self._bench.run_setting(setting)
            rows = self._rows(setting, PLAIN)
            if rows and rows[-1].decode_seconds:
                self._settings = self._settings[place:]
                return rows[-1].seconds
        why = next((row.error or row.note for row in self._results.rows if row.error or row.note), "nothing decoded")
        raise ValueError(f"no prompt leaves anything to time: {why}")

    def _affordable(self, seconds: float) -> tuple[str, ...]:
        """The first strategies, as many as there is time to warm up and try on a prompt; at least two."""
        most = _FIRST_SHARE * (self._ends - time.monotonic()) / (_FIRST_RUNS * seconds)
        return self._trial.strategies[: max(2, int(most))]

    def _left(self, field: Sequence[str]) -> tuple[str, ...]:
        """The strategies of the field that worked and may still be the best."""
        found = [each for each in map(self._candidate, field) if each.sound or not (each.error or each.of)]
        known = [each for each in found if each.speed is not None and each.low is not None]
        best = max(known, key=_speed, default=None)
        if best is None or best.low is None or best.prompts < FEWEST:
            return tuple(each.strategy for each in found)
        return tuple(each.strategy for each in found if each.high is None or each.high >= best.low)

    def _standing(self, field: Sequence[str]) -> list[Candidate]:
        """The sound ones, the quickest first."""
        return sorted((each for each in map(self._candidate, field) if each.sound), key=_speed, reverse=True)

    def _note(self, field: Sequence[str]) -> str:
        standing = self._standing(field)
        best = f"best so far {standing[0].strategy}, {standing[0].speed:.2f} times plain; " if standing else ""
        return f"{best}{len(field)} strategies left, {max(0.0, self._ends - time.monotonic()):.0f} s at most"

    def _candidate(self, strategy: str, among: int = 1) -> Candidate:
        """The strategy as far as it was measured; its interval is one of so many that hold together."""
        rows: list[Row] = []
        ratios: list[float] = []
        wholes: list[float] = []
        for setting in self._settings:
            own, plain = self._rows(setting, strategy), self._rows(setting, PLAIN)
            rows += own
            found = ratio(own, plain)
            ratios += [found.median] if found is not None else []
            found = ratio(own, plain, whole_rate)
            wholes += [found.median] if found is not None else []
        interval = Interval.of(ratios, among)
        steps = sum(row.steps for row in rows)
        return Candidate(
            strategy=strategy,
            prompts=len(ratios),
            rounds=max((len(self._rows(setting, strategy)) for setting in self._settings), default=0),
            tokens_per_second=_rate(rows),
            speed=geometric_mean(ratios) if ratios else None,
            low=interval.low if interval else None,
            high=interval.high if interval else None,
            tokens_per_step=sum(row.tokens for row in rows) / steps if steps else 0.0,
            same=sum(row.same for row in rows),
            of=sum(row.of for row in rows),
            whole=geometric_mean(wholes) if wholes else None,
            error=next((row.error for row in rows if row.error), ""),
        )

    def _rows(self, setting: BenchSetting, strategy: str) -> Sequence[Row]:
        plain, *_ = self._plan.cells_of(setting)
        return self._results.of(replace(plain, strategy=strategy))

    def _result(self, left_out: tuple[str, ...]) -> TrialResult:
        plain = _rate([row for setting in self._settings for row in self._rows(setting, PLAIN)])
        tried = [each for each in self._trial.strategies if each not in left_out]
        found = sorted((self._candidate(each, len(tried)) for each in tried), key=_place, reverse=True)
        best = choose(found)
        unreached = sum(not self._rows(setting, PLAIN) for setting in self._settings)
        return TrialResult(plain, tuple(replace(each, recommended=each is best) for each in found), left_out, unreached)


def choose(ranked: Sequence[Candidate]) -> Candidate | None:
    """The quickest of those that were measured longest, the default if it equals it; None if no gain is sure.

    One that takes longer with the prompt than plain decoding is no gain. On fewer than `ENOUGH` prompts none is sure.
    """
    longest = [each for each in ranked if each.sound and (each.rounds, each.prompts) == _length(ranked[0])]
    sure = [
        each
        for each in longest
        if each.low is not None and each.low > 1 and each.prompts >= ENOUGH and (each.whole is None or each.whole > 1)
    ]
    best = max(sure, key=_speed, default=None)
    usual = next((each for each in sure if each.strategy == DEFAULT_STRATEGY), None)
    return usual if best and usual and _speed(usual) * EQUAL >= _speed(best) else best


def _length(candidate: Candidate) -> tuple[int, int]:
    return candidate.rounds, candidate.prompts


def _place(candidate: Candidate) -> tuple[bool, tuple[int, int], float]:
    return candidate.sound, _length(candidate), _speed(candidate)


def _rate(rows: Sequence[Row]) -> float:
    """Tokens per second of all rows together."""
    own = measured(rows)
    seconds = sum(row.decode_seconds for row in own)
    return sum(row.decode_tokens for row in own) / seconds if seconds else 0.0


def _speed(candidate: Candidate) -> float:
    return candidate.speed or 0.0
