"""Busy processes: they burn a core each while they should, and never outlive the measurement."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from parlay.bench.host import burning, busy_cores
from parlay.bench.records import Results
from parlay.bench.runner import Bench, BenchPlan
from parlay.bench.workloads import Item, Workload
from parlay.llm import LLM
from parlay.system.threads import processors

LETTERS = Workload("letters", (Item(id="0", prompt="abc", max_tokens=8),))
PLAN = BenchPlan(model="tiny", strategies=(), workloads=(LETTERS,), rounds=1, keep_loops=True)

OWNER = """\
import time
from parlay.bench.host import burning, busy_cores
with burning(1):
    print(flush=True)
    time.sleep(60)
"""


def children(parent: int) -> list[int]:
    """Processes of a parent that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            state, owner = (entry / "stat").read_text().rpartition(") ")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if int(owner) == parent and state != "Z":
            found.append(int(entry.name))
    return found


def is_running(process: int) -> bool:
    """Whether it is there, and not only to be waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()[0] != "Z"
    except OSError:
        return False


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_so_many_processes_burn_and_all_are_gone_afterwards_even_after_an_error() -> None:
    before = set(children(os.getpid()))
    with pytest.raises(KeyboardInterrupt), burning(2):
        watch_and_raise(set(children(os.getpid())) - before)
    assert set(children(os.getpid())) <= before


def watch_and_raise(burners: set[int]) -> None:
    assert len(burners) == 2
    deadline = time.monotonic() + 600
    while min(map(cpu_seconds, burners)) < 0.05:
        assert time.monotonic() < deadline, "they don't burn"
    raise KeyboardInterrupt


def test_burners_end_when_whoever_started_them_is_killed() -> None:
    with subprocess.Popen((sys.executable, "-c", OWNER), stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        (burner,) = children(owner.pid)
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 600
    while is_running(burner):
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.05)


def test_busy_cores_are_counted_without_this_process() -> None:
    """As many burn as this process may use, by its mask and its quota."""
    assert 0.0 <= busy_cores() <= (os.cpu_count() or 1)
    usable = processors().threads
    with burning(usable):
        assert busy_cores() > 0.5 * usable


def test_each_load_is_a_cell_of_its_own_with_its_own_text_compared(tiny: LLM, tmp_path: Path) -> None:
    results = Results(tmp_path / "rows.jsonl", {})
    Bench(tiny, replace(PLAN, busy=(0, 1)), results).run()
    assert [(row.cell.busy, row.same, row.of) for row in results.rows] == [(0, 1, 1), (1, 1, 1)]


def test_requests_are_gone_through_again_while_there_is_time(
    tiny: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at the clock takes a tenth of a second there."""
    now = itertools.count()
    monkeypatch.setattr("parlay.bench.rounds.time", SimpleNamespace(monotonic=lambda: next(now) / 10))
    results = Results(tmp_path / "rows.jsonl", {})
    Bench(tiny, replace(PLAN, strategies=("jacobi",), seconds=0.35), results).run()
    plain, jacobi = results.rows
    assert plain.requests == jacobi.requests == 4
    assert (plain.same, jacobi.same) == (plain.of, jacobi.of) == (plain.requests, plain.requests)
