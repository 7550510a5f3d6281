"""Builds a strategy when a request first names it, in a second thread, so that other requests keep decoding."""

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
    """A strategy being built, and the jobs that wait for it."""

    strategy: UnbuiltStrategy
    jobs: list[PendingJob] = field(default_factory=list)


class StrategyBuilds:
    """Builds strategies one at a time, and holds the jobs that wait for them; other jobs keep decoding.

    Only the engine thread calls these methods and uses the strategies. ``beside`` runs a call in another thread. That
    thread calls ``wake`` when it has built a strategy; `take` then returns the jobs that waited for the strategy.
    """

    def __init__(
        self, llm: LLM, beside: Callable[[Callable[[], None]], Future[None]], wake: Callable[[], None]
    ) -> None:
        self._llm, self._beside, self._wake = llm, beside, wake
        self._asked: dict[StrategySpec, _Asked] = {}  # the first is being built
        self._building: Future[None] | None = None
        self._refusal: Callable[[], Closed] | None = None

    def hold(self, job: PendingJob) -> bool:
        """Hold a job until its strategy is built. Returns False if the strategy is built already.

        Raises UsageError if the strategy can't be built, and Closed after `refuse`.
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
        """Remove a job, and its strategy if no other job waits for that strategy. Returns False if the job was not
        held."""
        for number, (spec, asked) in enumerate(self._asked.items()):
            if job in asked.jobs:
                asked.jobs.remove(job)
                if number and not asked.jobs:
                    del self._asked[spec]
                return True
        return False

    @property
    def holding(self) -> bool:
        """Whether any job waits for its strategy."""
        return any(asked.jobs for asked in self._asked.values())

    def take(self) -> tuple[Sequence[PendingJob], BaseException | None]:
        """Add the strategy that has been built, if any, to the LLM's, and start building the next. Returns the jobs
        that waited for the strategy, and the error if building failed."""
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
        """Build no more strategies: from now on `hold` raises the error that ``refusal`` returns. Returns the jobs that
        waited."""
        self._refusal = refusal
        jobs = [job for asked in self._asked.values() for job in asked.jobs]
        for asked in self._asked.values():
            asked.jobs.clear()
        return jobs

    def close(self) -> None:
        """Wait for the build under way, and close the strategy that it built."""
        building, self._building = self._building, None
        if building is not None and building.exception() is None:
            next(iter(self._asked.values())).strategy.close()
        self._asked.clear()

    def _build(self) -> None:
        """Start building the strategy that was asked for first, unless a build is under way."""
        if self._building is None and self._asked:
            wake, first = self._wake, next(iter(self._asked.values()))
            self._building = self._beside(first.strategy.build)
            self._building.add_done_callback(lambda _: wake())
