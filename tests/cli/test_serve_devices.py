"""`parlay serve --devices auto`: several processes where they are predicted to be quicker, else one, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.simulation.cases import QWEN_7B
from parlay.cli import main
from parlay.cli.serve_devices import chosen, compare
from parlay.cost.devices import machine
from parlay.cost.overheads import Overheads
from parlay.simulate.splits import Link, Split

MACHINE = replace(machine("h100", "bfloat16"), attend_seconds=0.0, engine=Overheads())
LINK = Link(10e9, 1e-6, "shared memory")


def test_processes_that_share_one_memory_are_one_process() -> None:
    split, line = chosen(compare(QWEN_7B, MACHINE, 1e12, LINK, threads=8))
    assert split == Split()
    assert line.startswith("one process: a step of 16 requests is predicted to take ")


def test_where_each_sequence_costs_a_process_much_there_are_replicas() -> None:
    busy = replace(MACHINE, engine=Overheads(step=0.0, sequence=0.1))
    split, line = chosen(compare(QWEN_7B, busy, 1e12, LINK, threads=8))
    assert (split.replicas, split.tensor, split.pipeline) == (8, 1, 1)
    assert line.startswith("8 replicas: ")


def test_what_does_not_fit_twice_is_one_process() -> None:
    busy = replace(MACHINE, engine=Overheads(step=0.0, sequence=0.1))
    split, _ = chosen(compare(QWEN_7B, busy, 1.5 * QWEN_7B.stored_bytes, LINK, threads=2))
    assert split.replicas == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parlay-mini", "--replicas", "2"], "remove the flags"),
        (["parlay-mini", "--tensor-parallel", "2"], "remove the flags"),
        (["a=parlay-mini", "b=parlay-mini"], "works with one model, got 2"),
    ],
)
def test_flags_that_choose_already_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *words, "--devices", "auto", "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
