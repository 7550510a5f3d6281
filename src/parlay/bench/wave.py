"""Sends requests together, as a wave, to a `Decoder`. `Waves` is Parlay's; other modules implement other engines'.

Requests to Parlay share only the models. Each has a cache salt of its own, so every prompt is computed in full. No
drafter's store learns from a request.
"""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Protocol

from parlay.bench.host import forget_peak, peak_bytes
from parlay.bench.records import MEASURED, MODELLED
from parlay.bench.stopwatch import Reading, Stopwatch
from parlay.cost.energy import EnergyMeter, TooShort, Window
from parlay.llm.jobs import Job
from parlay.llm.llm import LLM
from parlay.llm.request_options import RequestOptions
from parlay.types import Exactness, Metrics, ParlayError, PowerModel, SamplingParams

Ids = tuple[int, ...]
UNMETERED = EnergyMeter((), "energy is not measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request as every system gets it. Its answer has at most ``most`` tokens.

    ``talk`` is the number of its conversation; None means that it belongs to no conversation.
    """

    ids: Ids
    most: int
    seed: int = 0
    references: tuple[str, ...] = ()
    prediction: str | None = None
    talk: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to an ask: its tokens, their times from the start of the wave, and the engine's counts."""

    reading: Reading
    metrics: Metrics

    @property
    def tokens(self) -> Ids:
        return self.reading.tokens


@dataclass(frozen=True, slots=True)
class Wave:
    """The answers of a wave, in the order of the asks. Decoding lasts from the first emission of any to the last.

    ``energy`` says where ``joules`` come from, as in a `Row`. ``values`` are further numbers of special measurements,
    by name; rows hold their sums.
    """

    answers: tuple[Answer, ...]
    seconds: float
    decode_tokens: int
    decode_seconds: float
    peak_memory_bytes: int = 0
    joules: float | None = None
    energy: str = ""
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Asks that are ready to be sent, the ``goals`` (plain decoding's answers), and a note on prompts left out."""

    asks: tuple[Ask, ...]
    goals: tuple[Ids, ...]
    looped: float | None
    note: str

    def filled(self, size: int) -> Prepared:
        """Return the same asks in whole waves of ``size``. The first asks are repeated to fill the last wave."""
        count = -(-len(self.asks) // size) * size
        pairs = list(islice(cycle(zip(self.asks, self.goals, strict=True)), count))
        return replace(self, asks=tuple(ask for ask, _ in pairs), goals=tuple(goal for _, goal in pairs))


class Decoder(Protocol):
    """An engine that is measured, with strategies or modes by name."""

    def decode(self, strategy: str, asks: Sequence[Ask], temperature: float) -> Wave:
        """Send the asks at once and wait for every answer. If it raises an error, it leaves no request running."""
        ...


def lone_wave(ask: Ask, strategy: str, reading: Reading) -> Wave:
    """Make a wave of one request from its reading, for engines that report nothing else. Its exactness is `seed`."""
    metrics = Metrics(
        strategy,
        Exactness.SEED,
        prompt_tokens=len(ask.ids),
        completion_tokens=len(reading.tokens),
        steps=reading.steps,
    )
    first, last = reading.first_seconds or 0.0, reading.last_seconds or 0.0
    return Wave((Answer(reading, metrics),), last, len(reading.tokens) - reading.first_tokens, last - first)


@dataclass(frozen=True, slots=True)
class Gauges:
    """Measures a run's time, peak memory and joules. If the meter has no counters, ``power`` models the joules."""

    device: str
    meter: EnergyMeter = UNMETERED
    power: PowerModel | None = None

    def measure(self, run: Callable[[Stopwatch], object], answers: Callable[[Stopwatch], Sequence[Answer]]) -> Wave:
        """Measure ``run``, which reports its emissions to the stopwatch. ``answers`` runs later and is not timed."""
        forget_peak(self.device)
        window = self.meter.begin()
        watch = Stopwatch()
        run(watch)
        seconds = time.perf_counter() - watch.began
        memory, joules = peak_bytes(self.device), self._joules(window)
        made, energy = tuple(answers(watch)), "" if joules is None else MEASURED
        if self.power is not None and not self.meter.includes:
            rows = sum(_rows(answer.metrics) for answer in made)
            joules, energy = self.power.watts * seconds + self.power.row_joules * rows, MODELLED
        return Wave(made, seconds, watch.decode_tokens, watch.decode_seconds, memory, joules, energy)

    def _joules(self, window: Window) -> float | None:
        try:
            return self.meter.end(window).joules
        except TooShort:
            return None


def _rows(metrics: Metrics) -> int:
    """Return the rows of the target's forwards: one for each new prompt token, each step and each drafted token."""
    return metrics.prompt_tokens - metrics.cached_tokens + metrics.steps + metrics.draft_tokens


class OutOfTime(BaseException):
    """Raised when a run's time is over. It is not an Exception, because `Rounds` turns these into rows with errors."""


class Waves:
    """Parlay as a `Decoder`. It raises OutOfTime once `time.monotonic` is past ``ends``, which callers may set."""

    def __init__(self, llm: LLM, meter: EnergyMeter = UNMETERED, power: PowerModel | None = None) -> None:
        self.ends = math.inf
        self._llm = llm
        self._gauges = Gauges(llm.runner.spec.device, meter, power)
        self._tenants = (f"bench {secrets.token_hex(8)} {number}" for number in itertools.count())

    def decode(self, strategy: str, asks: Sequence[Ask], temperature: float) -> Wave:
        """Decode as `Decoder.decode` says."""
        jobs = [self._job(strategy, ask, temperature) for ask in asks]
        self._llm.reset_prefix_cache()  # so that the peak of memory does not include earlier waves
        return self._gauges.measure(
            lambda watch: self._run(jobs, watch), lambda watch: [_answer(job, watch) for job in jobs]
        )

    def _job(self, strategy: str, ask: Ask, temperature: float) -> Job:
        params = SamplingParams(temperature=temperature, max_tokens=ask.most, seed=ask.seed)
        options = RequestOptions(
            strategy=strategy,
            documents=ask.references,
            prediction=ask.prediction,
            store=False,
            salt=next(self._tenants),
        )
        return self._llm.job({"prompt_token_ids": ask.ids}, params, options)

    def _run(self, jobs: Sequence[Job], watch: Stopwatch) -> None:
        engine = self._llm.engine
        live = {job.samples[0].request.id: job for job in jobs}
        try:
            for job in jobs:
                self._llm.add(job)
            while live:
                if time.monotonic() > self.ends:
                    raise OutOfTime
                for event in engine.step():
                    watch.emit(event.committed.tokens, event.request)
                    job = live[event.request]
                    job.event(job.samples[0], event)
                    if event.finish_reason is not None:
                        del live[event.request]
        finally:
            for name in live:
                engine.abort(name)


def _answer(job: Job, watch: Stopwatch) -> Answer:
    sample = job.output().outputs[0]
    if sample.error:
        raise ParlayError(sample.error)
    return Answer(watch.read(job.samples[0].request.id, steps=sample.metrics.steps), sample.metrics)
