"""Ranks that are slow, or links that are, change no text; what a rank has lost all of them hear of."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from parlay.models.part import Loss, Part
from parlay.options import LoadOptions, RankOptions
from parlay.ranks.groups import SharedGroup, make_shared_file
from parlay.ranks.layout import Layout
from parlay.ranks.leader import Leader
from parlay.ranks.starting import lead
from parlay.testing.checkpoints import save_random
from parlay.types import RunnerLost, Segment
from tests.ranks.conftest import Crew, Relay, limping, texts_of

LOAD = LoadOptions(dtype="float32", device="cpu", threads=1)
TEXT = tuple(range(1, 40))
TOGETHER = {"tensor_parallel": 2, "context_parallel": 2}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_random("llama", folder)
    return folder


def led(crew: Crew, model: Path, seconds: float = 300, **split: int) -> Leader:
    options = RankOptions(rank_timeout=seconds, **split)
    return lead(str(model), LOAD, options, cache_tokens=1024, start=crew.start)


@pytest.mark.parametrize("split", [{"pipeline_parallel": 2}, {"tensor_parallel": 2}, TOGETHER], ids=str)
def test_a_slow_rank_changes_no_text(crew: Crew, llama: Path, split: dict[str, int]) -> None:
    """It is stopped and goes on, again and again, while several requests decode."""
    runner = led(crew, llama, **split)
    expected = texts_of(runner)
    process, _ = crew.said()
    with limping(process):
        assert texts_of(runner) == expected


@pytest.mark.parametrize("split", [{"pipeline_parallel": 2}, {"tensor_parallel": 2}, {"context_parallel": 2}], ids=str)
def test_a_slow_link_changes_no_text(
    crew: Crew, llama: Path, monkeypatch: pytest.MonkeyPatch, split: dict[str, int]
) -> None:
    """All that two machines tell each other comes two milliseconds late."""
    expected = texts_of(led(crew, llama, **split))
    monkeypatch.setattr("parlay.ranks.starting.machine_name", lambda: "another machine")
    relays: list[Relay] = []

    def start(leader: tuple[str, int], count: int, secret: bytes) -> list[subprocess.Popen[bytes]]:
        relays.append(Relay(leader, delay=0.002))
        return crew.start(relays[0].address, count, secret)

    runner = lead(str(llama), LOAD, RankOptions(**split), cache_tokens=1024, start=start)
    assert texts_of(runner, tokens=8) == {name: text[:8] for name, text in expected.items()}
    runner.close()
    relays[0].close()


def test_a_rank_that_hangs_for_too_long_ends_all_of_both_groups(crew: Crew, llama: Path) -> None:
    """Though rank 0 exchanges nothing with it. Until then all logits are right, and each rank ends with one line."""
    runner = led(crew, llama, seconds=3, **TOGETHER)
    processes = [crew.said()[0] for _ in range(3)]

    def logits() -> torch.Tensor:
        runner.open(1, TEXT)
        assert runner.reserve(1, 64)
        out = runner.forward([Segment(1, TEXT)]).logits_RV
        runner.release(1)
        return out

    def until_lost() -> None:
        while True:
            assert logits().equal(expected)

    expected, began = logits(), time.monotonic()
    threading.Timer(0.1, os.kill, (processes[-1], signal.SIGSTOP)).start()
    try:
        with pytest.raises(RunnerLost) as lost:
            until_lost()
        assert "\n" not in str(lost.value)
        last = dict(crew.said() for _ in range(2))
        assert last.keys() == {*processes[:-1]}
        (gone,) = {1, 2, 3} - {int(line.split()[1]) for line in last.values()}
        assert all(f" ends: rank {gone} has " in line for line in last.values())
        assert f"rank {gone} has " in str(lost.value)
    finally:
        os.kill(processes[-1], signal.SIGKILL)  # ends one that is stopped, too
    assert time.monotonic() - began < 60


def test_what_one_group_has_lost_the_other_hears_of_before_it_uses_a_number() -> None:
    """Rank 3 is not there. Rank 0 shares neither layers nor texts with it, and the others go on with what they have."""
    layout = Layout(tensor=2, context=2)
    files = {members: make_shared_file(2) for members in {each for rank in range(4) for each in layout.groups(rank)}}
    raised: dict[int, str] = {}

    def run(rank: int) -> None:
        group, context = (
            SharedGroup(files[members], members, members.index(rank), 20 if 3 not in members else 0.2)
            for members in layout.groups(rank)
        )
        group.add(torch.ones(8))
        context.gather(torch.ones(2, 8))
        try:
            Part(group, context=context).check()
        except RunnerLost as error:
            raised[rank] = str(error)

    threads = [threading.Thread(target=partial(run, rank)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for file in files.values():
        file.unlink()
    gone = "rank 3 has not done its part of a forward within 0.2 s"
    assert raised == {0: "rank 3 has not done its part of a forward", 1: gone, 2: gone}


def test_a_rank_that_ends_is_not_said_to_be_late() -> None:
    """Even if rank 0 meets that in a sum before it hears of the closed connection."""
    file = make_shared_file(2)
    here, other = (SharedGroup(file, (0, 1), member, 20) for member in range(2))
    file.unlink()
    other.give_up()
    here.add(torch.ones(8))
    assert here.loss == Loss(1, "rank 1 has ended")
    here.give_up()  # the first reason stays
    for _ in range(2):  # rank 0 has done its part of the first sum, and not of the second
        other.add(torch.ones(8))
    assert other.loss == here.loss
