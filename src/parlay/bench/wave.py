"""Requests sent together, timed at their events: the one stopwatch of the bench, and its gauges.

Nothing is shared between requests but the models: each is a tenant of its own, so that no prompt is found cached and
every first token is paid for, and no store learns from any.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from parlay.bench.memory import forget_peak, peak_bytes
from parlay.energy import Meter, TooShort, Window
from parlay.llm import LLM
from parlay.requests import Job, RequestOptions
from parlay.types import Metrics, ParlayError, SamplingParams

Ids = tuple[int, ...]
UNMETERED = Meter((), "nobody asked")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A prompt as every strategy gets it; ``most`` tokens are wanted at most."""

    ids: Ids
    most: int
    seed: int
    references: tuple[str, ...] = ()
    prediction: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of an ask. Seconds are from the start of its wave; None where nothing was emitted."""

    tokens: Ids
    first_tokens: int
    first_seconds: float | None
    last_seconds: float | None
    metrics: Metrics

    @property
    def between_seconds(self) -> float | None:
        """Mean time between its tokens; None where all came at once."""
        later = len(self.tokens) - self.first_tokens
        if not later or self.first_seconds is None or self.last_seconds is None:
            return None
        return (self.last_seconds - self.first_seconds) / later


@dataclass(frozen=True, slots=True)
class Wave:
    """The answers, in the order of the asks. Decoding lasts from the first emission of any to the last."""

    answers: tuple[Answer, ...]
    seconds: float
    decode_tokens: int
    decode_seconds: float
    peak_memory_bytes: int
    joules: float | None


class Decoder(Protocol):
    """What decodes asks that are sent at once; ``strategy`` is its name in the rows."""

    def decode(self, strategy: str, asks: Sequence[Ask], temperature: float) -> Wave:
        """Wait for every answer. What fails raises, and leaves nothing under way."""
        ...


@dataclass(slots=True)
class Stopwatch:
    """When tokens were emitted, by request."""

    began: float = field(default_factory=time.perf_counter)
    first: dict[str, tuple[float, int]] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    emissions: int = 0
    before_decoding: int = 0
    """Tokens that came with the very first emission."""
    tokens: int = 0

    def emit(self, request: str, count: int) -> None:
        now = time.perf_counter() - self.began
        if not self.last:
            self.before_decoding = count
        self.first.setdefault(request, (now, count))
        self.last[request] = now
        self.tokens += count
        self.emissions += 1

    @property
    def decode_seconds(self) -> float:
        return max(self.last.values()) - min(at for at, _ in self.first.values()) if self.last else 0.0

    def answer(self, request: str, tokens: Ids, metrics: Metrics) -> Answer:
        at, count = self.first.get(request, (None, 0))
        return Answer(tokens, count, at, self.last.get(request), metrics)


@dataclass(frozen=True, slots=True)
class Timed:
    """What was seen of a run: its stopwatch, its length, the most memory held meanwhile, and joules where counted."""

    watch: Stopwatch
    seconds: float
    peak_memory_bytes: int
    joules: float | None

    def wave(self, answers: Iterable[Answer]) -> Wave:
        watch = self.watch
        decoded = watch.tokens - watch.before_decoding
        return Wave(tuple(answers), self.seconds, decoded, watch.decode_seconds, self.peak_memory_bytes, self.joules)


@dataclass(frozen=True, slots=True)
class Gauges:
    """What runs on a device are timed by; ``meter`` counts joules, where it can."""

    device: str
    meter: Meter

    def time(self, run: Callable[[Stopwatch], object]) -> Timed:
        """``run`` tells the stopwatch what it emits, when it does."""
        forget_peak(self.device)
        window = self.meter.begin()
        watch = Stopwatch()
        run(watch)
        seconds = time.perf_counter() - watch.began
        return Timed(watch, seconds, peak_bytes(self.device), self._joules(window))

    def _joules(self, window: Window) -> float | None:
        try:
            return self.meter.end(window).joules
        except TooShort:
            return None


class Waves:
    """Parlay as a `Decoder`."""

    def __init__(self, llm: LLM, meter: Meter | None = None) -> None:
        self._llm = llm
        self._gauges = Gauges(llm.runner.spec.device, meter or UNMETERED)
        self._tenants = (f"bench {secrets.token_hex(8)} {number}" for number in itertools.count())

    def decode(self, strategy: str, asks: Sequence[Ask], temperature: float) -> Wave:
        """See `Decoder`."""
        jobs = [self._job(strategy, ask, temperature) for ask in asks]
        self._llm.reset_prefix_cache()  # else the peak of memory would tell of all waves before
        timed = self._gauges.time(lambda watch: self._run(jobs, watch))
        return timed.wave(_answer(job, timed.watch) for job in jobs)

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
                for event in engine.step():
                    if event.committed:
                        watch.emit(event.request, len(event.committed))
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
    return watch.answer(job.samples[0].request.id, sample.token_ids, sample.metrics)
