"""The number of threads: what the machine allows, what a user asks for, and errors that say what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from parlay.engine import Engine
from parlay.router.policies import Plain
from parlay.sampling.rules import SharedNoise
from parlay.system import threads
from parlay.system.threads import Processors, processors
from parlay.testing.conformance.stage import Steady
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import NoiseKey, Request, SamplingParams, Strategy


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(threads.SWITCH, raising=False)
    before = threads.count()
    monkeypatch.setattr(threads, "_chosen", None)
    yield
    threads.use(before)


def machine(folder: Path, siblings: dict[int, str], files: dict[str, str], groups: str = "0::/a/b\n") -> Processors:
    """What is read of a machine that has these files below /sys, while the process may run on 0 to 3."""
    for number, text in siblings.items():
        place = folder / f"sys/devices/system/cpu/cpu{number}/topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(text)
    for name, text in files.items():
        place = folder / "sys/fs/cgroup" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    (folder / "proc").mkdir()
    (folder / "proc/cgroup").write_text(groups)
    return processors(folder / "sys", folder / "proc")


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


@pytest.mark.usefixtures("four")
def test_two_threads_of_a_core_count_once(tmp_path: Path) -> None:
    found = machine(tmp_path, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, {})
    assert (found.usable, found.cores, found.threads) == (4, 2, 2)


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(
    ("files", "groups", "quota", "wanted"),
    [
        ({"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, "0::/a/b\n", 1.5, 2),
        ({"a/b/cpu.max": "40000 100000\n"}, "0::/a/b\n", 0.4, 1),
        ({"cpu.max": "max 100000\n"}, "0::/\n", None, 4),
        ({"cpu,cpuacct/a/cpu.cfs_quota_us": "300000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
         "4:cpu,cpuacct:/a\n3:memory:/a\n", 3.0, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/\n", None, 4),
    ],
)  # fmt: skip
def test_a_quota_bounds_the_threads(
    tmp_path: Path, files: dict[str, str], groups: str, quota: float | None, wanted: int
) -> None:
    found = machine(tmp_path, {}, files, groups)
    assert (found.quota, found.threads) == (quota, wanted)


def test_an_affinity_mask_of_one_means_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
    threads.settle(None)
    assert threads.count() == 1
    with pytest.raises(ValueError, match=r"^threads=2: this process may use 1 to 1 processors; give a number in that"):
        threads.settle(2)


@pytest.mark.parametrize("wanted", [0, -1, 10_000])
def test_a_number_that_cannot_be_had_is_one_clear_line(wanted: int) -> None:
    with pytest.raises(ValueError, match=rf"^threads={wanted}: this process may use 1 to \d+ processors; give a"):
        threads.settle(wanted)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("two", "PARLAY_THREADS must be a whole number of threads, got two"),
        ("0", "PARLAY_THREADS=0: this process may use 1 to"),
        ("99999", "PARLAY_THREADS=99999: this process may use 1 to"),
    ],
)
def test_the_environment_variable_is_named_in_its_errors(
    monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setenv(threads.SWITCH, text)
    with pytest.raises(ValueError, match=f"^{message}"):
        threads.settle(None)


def test_who_asks_comes_before_the_environment_and_the_first_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setenv(threads.SWITCH, "2")
    threads.settle(None)
    assert threads.count() == 2
    threads.settle(3)
    threads.settle(None)
    assert threads.count() == 3
    with threads.using(1):
        assert threads.count() == 1
    assert threads.count() == 3


class Watcher:
    """A stop checker that stops nothing, and notes on how many threads torch computes when a token is committed."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def push(self, token: int) -> bool:
        self.seen.append(torch.get_num_threads())
        return False


def test_torch_computes_on_one_thread_between_forwards() -> None:
    """Its other threads spin for a while after each operation that they shared, beside the decoder's pool."""
    watcher = Watcher()
    with threads.using(2):
        engine = Engine(ToyRunner(RandomLogits(16, seed=3), 16), Steady())
        request = Request(
            id="a", prompt=(1, 2), params=SamplingParams(max_tokens=4), key=NoiseKey(1), stop_checker=watcher
        )
        engine.add(request, Strategy("none", (), SharedNoise(), Plain()))
        while not engine.idle:
            engine.step()
        assert torch.get_num_threads() == 2
    assert watcher.seen == [1, 1, 1, 1]


def test_forwards_of_torch_have_all_threads() -> None:
    with threads.using(2), threads.torch_on_one():
        with threads.torch_on_all():
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 1


def test_whoever_is_interrupted_waits_for_what_has_begun_and_for_little_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing a large model is minutes of such jobs, and Ctrl-C should not take as long."""
    monkeypatch.setattr(threads, "count", lambda: 2)
    done: list[int] = []
    jobs = [partial(done.append, number) for number in range(100)]
    running = threads.run(jobs)
    assert next(running) == 1
    del running  # as an error does that comes between two of them
    assert len(done) <= 4


def failing() -> None:
    raise ZeroDivisionError


def test_all_jobs_run_and_what_one_raises_is_raised() -> None:
    done: list[int] = []
    assert [*threads.run([partial(done.append, number) for number in range(40)])] == [*range(1, 41)]
    assert sorted(done) == [*range(40)]
    with pytest.raises(ZeroDivisionError):
        [*threads.run([failing])]
