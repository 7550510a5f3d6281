"""Builds the strategies that requests are the first to name, in a thread beside the engine's, so that others go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from parlay.aio.stream import Closed, PendingJob
from parlay.llm.llm import LLM
from parlay.strategies.built import UnbuiltStrategy
from parlay.strategies.spelling import StrategySpec


@dataclass(slots=True)
class _Asked:
    """A strategy, and the jobs that wait for it."""

    strategy: UnbuiltStrategy
    jobs: list[PendingJob] = field(default_factory=list)


class StrategyBuilds:
    """Builds strategies, one at a time, for jobs that wait here meanwhile; others go on.

    The engine thread makes all calls, and alone touches what is built. ``beside`` makes a call in another thread, from
    which ``wake`` is called when a strategy is built: then `take` has something.
    """

    def __init__(
        self, llm: LLM, beside: Callable[[Callable[[], None]], Future[None]], wake: Callable[[], None]
    ) -> None:
        self._llm, self._beside, self._wake = llm, beside, wake
        self._asked: dict[StrategySpec, _Asked] = {}  # the first is being built
        self._building: Future[None] | None = None
        self._refusal: Callable[[], Closed] | None = None

    def hold(self, job: PendingJob) -> bool:
        """Keep a job until its strategy is there. False: it is there.

        Raises UsageError for a strategy that can't be had, and Closed.
        """
        for strategy in {sample.strategy for sample in job.job.samples}:
            unbuilt = self._llm.strategies.unbuilt(strategy)
            if unbuilt is not None:
                if self._refusal is not None:
                    raise self._refusal()
                self._asked.setdefault(unbuilt.spec, _Asked(unbuilt)).jobs.append(job)
                self._build()
                return True
        return False

    def leave(self, job: PendingJob) -> bool:
        """Let go of a job, and of a strategy that nobody else waits for. False: the job does not wait here."""
        for number, (spec, asked) in enumerate(self._asked.items()):
            if job in asked.jobs:
                asked.jobs.remove(job)
                if number and not asked.jobs:
                    del self._asked[spec]
                return True
        return False

    @property
    def holding(self) -> bool:
        """Whether jobs wait here."""
        return any(asked.jobs for asked in self._asked.values())

    def take(self) -> tuple[Sequence[PendingJob], BaseException | None]:
        """Take what has been built since, if anything, and build the next. Returns the jobs that waited for it.

        Beside them stands why they can't have it, or None.
        """
        if self._building is None or not self._building.done():
            return (), None
        asked, error = self._asked.pop(next(iter(self._asked))), self._building.exception()
        self._building = None
        try:
            if error is None:
                self._llm.strategies.take(asked.strategy)
        except BaseException as failure:
            error = failure
        self._build()
        return asked.jobs, error

    def refuse(self, refusal: Callable[[], Closed]) -> list[PendingJob]:
        """Build nothing more from now on, and raise what ``refusal`` makes instead. Returns the jobs that waited."""
        self._refusal = refusal
        jobs = [job for asked in self._asked.values() for job in asked.jobs]
        for asked in self._asked.values():
            asked.jobs.clear()
        return jobs

    def close(self) -> None:
        """Wait for what is being built, and drop it."""
        building, self._building = self._building, None
        if building is not None and building.exception() is None:
            next(iter(self._asked.values())).strategy.close()
        self._asked.clear()

    def _build(self) -> None:
        """Begin with the strategy that was asked for first, if none is being built."""
        if self._building is None and self._asked:
            wake, first = self._wake, next(iter(self._asked.values()))
            self._building = self._beside(first.strategy.build)
            self._building.add_done_callback(lambda _: wake())
