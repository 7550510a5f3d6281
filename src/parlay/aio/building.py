"""Builds a strategy when a request first names it, in a second thread, so that other requests keep decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

from parlay.aio.stream import Closed, PendingJob
from parlay.llm.llm import LLM
from parlay.strategies.built import UnbuiltStrategy
from parlay.strategies.spelling import StrategySpec
from parlay.types import ParlayError


@contextmanager
def _field_declared() -> Iterator[None]:
    """Declare that errors are about the request's strategy: what builds one does not know who named it."""
    try:
        yield
    except ParlayError as error:
        error.fields = ("strategy", *error.fields)
        raise


@dataclass(slots=True)
class _Build:
    """A strategy being built, and the jobs that wait for it."""

    strategy: UnbuiltStrategy
    jobs: list[PendingJob] = field(default_factory=list)


class StrategyBuilds:
    """Builds strategies one at a time, and holds the jobs that wait for them; other jobs keep decoding.

    Only the engine thread calls these methods and uses the strategies. ``run_in_thread`` runs a call in another thread.
    That thread calls ``wake`` when it has built a strategy; `take` then returns the jobs that waited for the strategy.
    """

    def __init__(
        self, llm: LLM, run_in_thread: Callable[[Callable[[], None]], Future[None]], wake: Callable[[], None]
    ) -> None:
        self._llm, self._run_in_thread, self._wake = llm, run_in_thread, wake
        self._builds: dict[StrategySpec, _Build] = {}  # the first is being built
        self._building: Future[None] | None = None
        self._refusal: Callable[[], Closed] | None = None

    def hold(self, job: PendingJob) -> bool:
        """Hold a job until its strategy is built. Returns False if the strategy is built already, or now.

        Raises UsageError if the strategy can't be used, and Closed after `refuse`.
        """
        for strategy in {sample.strategy for sample in job.job.samples}:
            with _field_declared():
                unbuilt = self._llm.strategies.unbuilt(strategy)
                if unbuilt is None:
                    self._llm.strategies.get(strategy)  # builds one without drafters, which takes no time
            if unbuilt is not None:
                if self._refusal is not None:
                    raise self._refusal()
                self._builds.setdefault(unbuilt.spec, _Build(unbuilt)).jobs.append(job)
                self._build()
                return True
        return False

    def leave(self, job: PendingJob) -> bool:
        """Remove a job, and its strategy if no other job waits for that strategy. Returns False if the job was not
        held."""
        for number, (spec, build) in enumerate(self._builds.items()):
            if job in build.jobs:
                build.jobs.remove(job)
                if number and not build.jobs:
                    del self._builds[spec]
                return True
        return False

    @property
    def holding(self) -> bool:
        """Whether any job waits for its strategy."""
        return any(build.jobs for build in self._builds.values())

    def take(self) -> tuple[Sequence[PendingJob], BaseException | None]:
        """Add the strategy that has been built, if any, to the LLM's, and start building the next. Returns the jobs
        that waited for the strategy, and the error if building failed."""
        if self._building is None or not self._building.done():
            return (), None
        build, error = self._builds.pop(next(iter(self._builds))), self._building.exception()
        self._building = None
        try:
            with _field_declared():
                if error is not None:
                    raise error
                self._llm.strategies.take(build.strategy)
        except BaseException as failure:
            error = failure
        self._build()
        return build.jobs, error

    def refuse(self, refusal: Callable[[], Closed]) -> list[PendingJob]:
        """Build no more strategies: from now on `hold` raises the error that ``refusal`` returns. Returns the jobs that
        waited."""
        self._refusal = refusal
        jobs = [job for build in self._builds.values() for job in build.jobs]
        for build in self._builds.values():
            build.jobs.clear()
        return jobs

    def close(self) -> None:
        """Wait for the build under way, and close the strategy that it built."""
        building, self._building = self._building, None
        if building is not None and building.exception() is None:
            next(iter(self._builds.values())).strategy.close()
        self._builds.clear()

    def _build(self) -> None:
        """Start building the strategy that was asked for first, unless a build is under way."""
        if self._building is None and self._builds:
            wake, first = self._wake, next(iter(self._builds.values()))
            self._building = self._run_in_thread(first.strategy.build)
            self._building.add_done_callback(lambda _: wake())
