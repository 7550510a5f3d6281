"""The number of threads that decode.

The process has one such number: the compiled decoder's pool and torch's forwards use it. Between forwards torch
computes on one thread. After an operation on several threads, torch's threads spin for milliseconds; the small
operations of sampling, in each step, would take cores from the pool that way.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Self

import torch

from parlay.types import FieldError, UsageError

SWITCH = "PARLAY_THREADS"
"""Environment variable: the default number of threads."""

_chosen: int | None = None
_lent = 0
_lending = threading.Lock()
_forked = False


@dataclass(frozen=True, slots=True)
class Processors:
    """Processors of this process. ``usable``: logical processors that it may run on. ``cores``: physical cores among
    them.

    ``quota``: seconds of CPU time per second that its control group allows; None: no limit.
    """

    usable: int
    cores: int
    quota: float | None

    @property
    def threads(self) -> int:
        """One thread per physical core, but not more than the quota allows."""
        allowed = self.cores if self.quota is None else max(1, round(self.quota))
        return min(self.cores, allowed)


def count() -> int:
    """Return the number of threads that decode: the number set by `use`, or else torch's own, minus the lent
    threads."""
    return max(1, (_chosen or torch.get_num_threads()) - _lent)


def lend(threads: int) -> None:
    """Decode with ``threads`` fewer threads, but at least one, until `take_back`. Any thread may call both
    functions."""
    global _lent
    with _lending:
        _lent += threads


def take_back(threads: int) -> None:
    """Decode with ``threads`` more threads again, after `lend`."""
    lend(-threads)


def use(threads: int) -> None:
    """Decode with ``threads`` threads from now on, in every model of this process. Raises ValueError below 1."""
    global _chosen  # the process has one pool
    if threads < 1:
        raise FieldError("threads", f"must be at least 1, got {threads}")
    _keep_forks_alive()
    _chosen = threads
    torch.set_num_threads(1 if _forked else threads)


def settle(wanted: int | None) -> None:
    """Decode with ``wanted`` threads. None keeps the number chosen earlier, or else takes this machine's default.

    Raises ValueError for a number that this process can't have; the message names the option or variable that set it.
    """
    if wanted is not None:
        use(_possible(wanted, f"threads={wanted}"))
    elif _chosen is None:
        use(usual())


def usual() -> int:
    """Return the number in the variable `SWITCH`, or else one thread per usable core, within the quota and torch's own
    number.

    Raises ValueError for a value of the variable that is not a possible number.
    """
    text = os.environ.get(SWITCH, "").strip()
    if not text:
        return min(processors().threads, torch.get_num_threads())
    try:
        return _possible(int(text), f"{SWITCH}={text}")
    except ValueError:
        if text.lstrip("+-").isdigit():
            raise
        raise ValueError(f"{SWITCH} must be a whole number of threads, got {text}") from None


@cache
def _keep_forks_alive() -> None:
    """Make torch use one thread in forked processes. A fork has none of torch's other threads, and torch would wait for
    them.

    The decoder's pool starts its threads again by itself.
    """
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=_go_on_alone)


def _go_on_alone() -> None:
    global _forked, _lent
    _forked, _lent = True, 0
    torch.set_num_threads(1)


class _TorchThreads(ContextDecorator):
    """Context manager: inside, torch computes on ``number()`` threads. It is a class, not a generator, because every
    step enters one and a class is faster. A number is compared first, because setting it is slower than reading it."""

    __slots__ = ("_before", "_number")

    def __init__(self, number: Callable[[], int]) -> None:
        self._number = number

    def _recreate_cm(self) -> Self:
        return type(self)(self._number)  # each call of a decorated function gets its own, because calls may nest

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        if (number := self._number()) != self._before:
            torch.set_num_threads(number)

    def __exit__(self, *raised: object) -> None:
        if torch.get_num_threads() != self._before:
            torch.set_num_threads(self._before)


def torch_on_one() -> _TorchThreads:
    """Context manager and decorator: inside, torch computes on this thread alone."""
    return _TorchThreads(lambda: 1)


def torch_on_all() -> _TorchThreads:
    """Context manager and decorator for a forward of torch operators: inside, torch uses all threads that decode."""
    return _TorchThreads(lambda: 1 if _forked else count())


@contextmanager
def using(threads: int | None) -> Iterator[None]:
    """Context manager: decode with ``threads`` threads inside; None changes nothing."""
    before = _chosen or torch.get_num_threads()
    try:
        if threads is not None:
            use(threads)
        yield
    finally:
        use(before)


def run(jobs: Sequence[Callable[[], object]]) -> Iterator[int]:
    """Run jobs on `count` threads; yields the number of finished jobs after each. Raises an error that a job raises.

    Only two jobs per thread are submitted at a time, so that an interrupted program waits for few jobs.
    """
    left, over, under_way = iter(jobs), 0, set[Future[object]]()
    with ThreadPoolExecutor(size := count()) as pool:
        while over < len(jobs):
            under_way |= {pool.submit(job) for job in islice(left, 2 * size - len(under_way))}
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for each in done:
                each.result()
                over += 1
                yield over


def processors(system: Path = Path("/sys"), process: Path = Path("/proc/self")) -> Processors:
    """Find the processors of this process, by affinity mask, core topology and control groups (Linux)."""
    usable = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))
    topology = "devices/system/cpu/cpu{}/topology/thread_siblings_list"
    siblings = {_text(system / topology.format(number)) or str(number) for number in usable}
    return Processors(usable=len(usable), cores=len(siblings), quota=_quota(system / "fs/cgroup", process / "cgroup"))


def _possible(threads: int, prefix: str) -> int:
    usable = processors().usable
    if not 1 <= threads <= usable:
        problem = f"this process may use 1 to {usable} processors; give a number in that range"
        raise UsageError(f"{prefix}: {problem}", "threads")
    return threads


def _quota(groups: Path, membership: Path) -> float | None:
    """Return the smallest quota of the process's control groups and their parents, versions 1 and 2."""
    quotas: list[float] = []
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = groups / controllers if controllers else groups
        inside = Path(path.lstrip("/"))
        for folder in (root / inside, *(root / above for above in inside.parents)):
            quotas.extend(_quotas_of(folder))
    return min(quotas, default=None)


def _quotas_of(folder: Path) -> Iterator[float]:
    words = _text(folder / "cpu.max").split() or [
        _text(folder / "cpu.cfs_quota_us"),
        _text(folder / "cpu.cfs_period_us"),
    ]
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
        yield int(words[0]) / int(words[1])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
