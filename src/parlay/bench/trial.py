"""Finds the fastest strategy for a user's own prompts, by a race of strategies with plain decoding.

Each prompt is a workload of its own, so every strategy is compared with plain decoding of the same prompt at about the
same time. A strategy leaves the race when its interval lies below the best strategy's. The race ends when its time is
over. Answers are limited so that there should be time for two strategies on the first prompt.
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
"""Number of strategies that are measured again after the first round."""
FEWEST = 3
"""Number of prompts after which strategies may leave the race."""
ENOUGH = 5
"""Number of prompts that a recommendation needs."""
EQUAL = 1.02
"""The default strategy is recommended, unless another one is more than this many times as fast."""
_FIRST_SHARE = 0.4
"""The share of the race's time that the first prompt may take, including the warm-up of every strategy."""
_FIRST_RUNS = 2.3
"""Runs that a strategy makes on the first prompt: a short one and a whole one to warm up, and a timed one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A race to run: ``strategies``, the most promising first, on ``prompts``, until ``minutes`` after ``began``.

    ``began`` is a time of `time.monotonic`, so that the caller can count earlier work, such as loading the model. The
    first round goes through all prompts while there is time. Further rounds, up to ``rounds``, are only for the best
    strategies.
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
    """A strategy and its measurements on ``prompts`` prompts, in at most ``rounds`` rounds.

    ``speed`` is a multiple of plain decoding's, the geometric mean over prompts; None if nothing was timed. ``low`` and
    ``high`` bound its 95 % interval; None for a single prompt. In a `TrialResult` the intervals of all strategies hold
    together. ``whole`` is the speed of whole requests, which includes the time in which a draft model reads the prompt.
    Of ``of`` compared texts, ``same`` were equal to plain decoding's.
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
        """Whether it was timed without an error, and all its texts were equal to plain decoding's."""
        return self.speed is not None and not self.error and 0 < self.of == self.same


@dataclass(frozen=True, slots=True)
class TrialResult:
    """All candidates, the best first. ``plain`` is plain decoding's speed in tokens per second.

    There was no time to try the strategies ``left_out``, nor the last ``unreached`` prompts.
    """

    plain: float
    candidates: tuple[Candidate, ...]
    left_out: tuple[str, ...] = ()
    unreached: int = 0

    @property
    def best(self) -> Candidate | None:
        """The recommended candidate; None if no candidate is proved to be faster than plain decoding."""
        return next((each for each in self.candidates if each.recommended), None)

    @property
    def lacking(self) -> int:
        """Number of further prompts that a recommendation needs."""
        return max(0, ENOUGH - max((each.prompts for each in self.candidates if each.sound), default=0))


def without_training(llm: LLM) -> tuple[str, ...]:
    """Return the exact strategies that work with the model without options or training; members of `auto` first."""
    return _exact(llm, "none")


def usual_strategies(llm: LLM, own: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the strategies to try, in order: the default, a draft model if any, the user's ``own``, and the others."""
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
    """Race the strategies. ``say`` gets announcements, and ``step`` gets a note after each prompt.

    Raises ValueError if no prompt has an answer that can be timed.
    """
    return _Race(llm, trial, results).run(say, step)


class _Race:
    """The state of one trial."""

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
        """Return the limit on an answer's tokens for which there is time, by the speed of a short plain answer."""
        began = time.monotonic()
        with suppress(Exception):  # if the first prompt fails, its row will hold the error
            Preparation(llm, Waves(llm), FEWEST_TOKENS, keep_loops=True).prepare(
                plan.workloads[0], self._trial.temperature, 0
            )
        pace = (time.monotonic() - began) / FEWEST_TOKENS
        most = _FIRST_SHARE * max(0.0, self._ends - began) / ((1 + 3 * _FIRST_RUNS) * pace)
        return max(min(self._trial.max_tokens, int(most)), min(self._trial.max_tokens, FEWEST_TOKENS))

    def run(self, say: Callable[[str], object], step: Callable[[str], object]) -> TrialResult:
        most = self._plan.max_tokens
        why = f" (not {self._trial.max_tokens}, because time is short)" if most != self._trial.max_tokens else ""
        say(f"timing plain decoding of a prompt, {most} tokens at most{why}")
        seconds = self._time_plain()
        field = self._affordable(seconds)
        left_out = self._trial.strategies[len(field) :]
        count = len(self._settings)
        say(
            f"{len(field)} strategies on {counted(count, 'prompt')}: each takes about "
            f"{(count + _FIRST_RUNS - 1) * seconds:.0f} s to try once (plain decoding {seconds:.1f} s a prompt); at "
            f"most {self._trial.minutes:g} minute{'s' * (self._trial.minutes != 1)}, "
            f"{time.monotonic() - self._trial.began:.0f} s of them have passed"
        )
        with suppress(KeyboardInterrupt, OutOfTime):  # show what was measured until then
            self._rounds(field, step)
        return self._result(left_out)

    def _rounds(self, field: tuple[str, ...], step: Callable[[str], object]) -> None:
        """Measure all prompts once with the strategies ``field``, then again with the best, until time is over."""
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
        """Return plain decoding's seconds for the first prompt that can be timed. The race begins with this prompt."""
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
        """Return the first strategies: as many as there is time to warm up and try on one prompt, and at least two."""
        most = _FIRST_SHARE * (self._ends - time.monotonic()) / (_FIRST_RUNS * seconds)
        return self._trial.strategies[: max(2, int(most))]

    def _left(self, field: Sequence[str]) -> tuple[str, ...]:
        """Return the strategies of ``field`` that have not failed and may still be the best."""
        found = [each for each in map(self._candidate, field) if each.sound or not (each.error or each.of)]
        known = [each for each in found if each.speed is not None and each.low is not None]
        best = max(known, key=_speed, default=None)
        if best is None or best.low is None or best.prompts < FEWEST:
            return tuple(each.strategy for each in found)
        return tuple(each.strategy for each in found if each.high is None or each.high >= best.low)

    def _standing(self, field: Sequence[str]) -> list[Candidate]:
        """Return the sound candidates of ``field``, the fastest first."""
        return sorted((each for each in map(self._candidate, field) if each.sound), key=_speed, reverse=True)

    def _note(self, field: Sequence[str]) -> str:
        standing = self._standing(field)
        best = f"best so far {standing[0].strategy}, {standing[0].speed:.2f} times plain; " if standing else ""
        return f"{best}{len(field)} strategies left, {max(0.0, self._ends - time.monotonic()):.0f} s at most"

    def _candidate(self, strategy: str, among: int = 1) -> Candidate:
        """Return a strategy's measurements so far, with an interval so wide that ``among`` such ones hold together."""
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
    """Return the candidate to recommend; None if no candidate is proved to be faster than plain decoding.

    Only candidates with the most rounds and prompts compete. Their intervals must lie above 1, they must have at least
    `ENOUGH` prompts, and whole requests must be faster, too. The fastest is returned, or the default strategy if it is
    about as fast; see `EQUAL`.
    """
    longest = [each for each in ranked if each.sound and (each.rounds, each.prompts) == _length(ranked[0])]
    sure = [
        each
        for each in longest
        if each.low is not None and each.low > 1 and each.prompts >= ENOUGH and (each.whole is None or each.whole > 1)
    ]
    best = max(sure, key=_speed, default=None)
    default = next((each for each in sure if each.strategy == DEFAULT_STRATEGY), None)
    return default if best and default and _speed(default) * EQUAL >= _speed(best) else best


def _length(candidate: Candidate) -> tuple[int, int]:
    return candidate.rounds, candidate.prompts


def _place(candidate: Candidate) -> tuple[bool, tuple[int, int], float]:
    return candidate.sound, _length(candidate), _speed(candidate)


def _rate(rows: Sequence[Row]) -> float:
    """Return tokens per second of all rows together."""
    own = measured(rows)
    seconds = sum(row.decode_seconds for row in own)
    return sum(row.decode_tokens for row in own) / seconds if seconds else 0.0


def _speed(candidate: Candidate) -> float:
    return candidate.speed or 0.0
