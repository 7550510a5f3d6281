"""Stages work for several groups of sequences at once: the same texts; one that is lost ends all."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from parlay import models
from parlay.options import LoadOptions, RankOptions
from parlay.ranks.leader import Leader
from parlay.ranks.starting import lead
from parlay.testing.checkpoints import save_random
from parlay.testing.conformance import check_runner, check_strategy, runner_stage
from parlay.testing.conformance.stages import recomputed
from parlay.types import Runner, RunnerLost
from tests.ranks.conftest import Crew, Relay, decode, texts_of

LOAD = LoadOptions(dtype="float32", device="cpu", threads=1)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_random("llama", folder)
    return folder


def alone(model: Path) -> Runner:
    return models.load(str(model), LOAD, cache_tokens=2048)


def lead_stages(crew: Crew, model: Path, capacity: int = 2048, *, seconds: float = 300, tensor: int = 1) -> Leader:
    options = RankOptions(pipeline_parallel=2, tensor_parallel=tensor, rank_timeout=seconds)
    return lead(str(model), LOAD, options, cache_tokens=capacity, start=crew.start)


@pytest.mark.parametrize(
    ("strategy", "checks"),
    [
        ("prompt-lookup:k=4", ["mixed", "preemption"]),
        ("token-recycling:k=6", ["sampled", "interruptions"]),
    ],
)
def test_strategies_give_the_text_of_plain_decoding(
    crew: Crew, llama: Path, strategy: str, checks: Sequence[str]
) -> None:
    """Chains and trees; while groups are in flight, requests end, are preempted, and share what is cached."""
    stage = runner_stage("two stages", partial(lead_stages, crew, llama), lambda: alone(llama))
    report = check_strategy(strategy, stages=[stage], checks=checks)
    assert report.passed, report


def test_stages_keep_what_a_runner_promises(crew: Crew, llama: Path) -> None:
    """With two forwards under way, whose outputs are waited for in any order."""
    report = check_runner(partial(lead_stages, crew, llama), recomputed(alone(llama)), steps=15)
    assert report.passed, report


def decode_until_lost(runner: Runner, texts: dict[str, list[int]]) -> None:
    """Decode the same requests again and again; ``texts`` are in the end those that were cut short."""
    while True:
        texts.clear()
        decode(runner, texts)


def test_two_groups_are_in_flight(crew: Crew, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the last, whenever one is waited for."""
    runner, log = lead_stages(crew, llama), list[str]()
    begin = runner.begin

    def noted(*arguments: object) -> object:
        log.append("begin")
        finish = begin(*arguments)  # type: ignore[arg-type]
        return lambda: (log.append("finish"), finish())[1]

    monkeypatch.setattr(runner, "begin", noted)
    assert texts_of(runner) == texts_of(alone(llama))
    ends = [place for place, what in enumerate(log) if what == "finish"]
    under_way = [log[:place].count("begin") - log[:place].count("finish") for place in ends]
    assert under_way[:-1] == [2] * (len(ends) - 1)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_rank_that_is_lost_with_two_groups_in_flight_ends_all(crew: Crew, llama: Path, sent: signal.Signals) -> None:
    """Within the ranks' time. What was written until then is right."""
    runner, texts = lead_stages(crew, llama, seconds=5), dict[str, list[int]]()
    process, _ = crew.said()
    limit = threading.Timer(0.2, os.kill, (process, sent))
    limit.start()
    began = time.monotonic()
    try:
        with pytest.raises(RunnerLost, match="rank 1 has"):
            decode_until_lost(runner, texts)
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    assert time.monotonic() - began < 100
    whole = texts_of(alone(llama))
    assert all(whole[name][: len(text)] == text for name, text in texts.items())
    assert runner.followers.loss()


@pytest.mark.parametrize(
    ("stalls", "reason", "tensor"),
    [(False, "has ended", 1), (False, "has ended", 2), (True, "for 5 s", 1)],
    ids=["cut", "cut, shares of stages", "stalled"],
)
def test_a_link_that_is_lost_in_mid_frame_ends_all(
    crew: Crew, llama: Path, stalls: bool, reason: str, tensor: int
) -> None:
    """Each rank says in one line that it ends, within the ranks' time."""
    relays: list[Relay] = []

    def start(leader: tuple[str, int], count: int, secret: bytes) -> list[object]:
        relays.append(Relay(leader))
        crew.start(relays[0].address, count, secret)
        return []

    options = RankOptions(pipeline_parallel=2, tensor_parallel=tensor, rank_timeout=5)
    runner = lead(str(llama), LOAD, options, cache_tokens=1024, start=start)  # type: ignore[arg-type]
    others = 2 * tensor - 1
    processes = {crew.said()[0] for _ in range(others)}
    decode(runner, {})
    relays[0].end(1001, stalls=stalls)
    began = time.monotonic()
    with pytest.raises(RunnerLost, match=reason) as lost:
        decode_until_lost(runner, {})
    assert "\n" not in str(lost.value)
    last = dict(crew.said() for _ in range(others))
    assert last.keys() == processes
    assert all(" ends: " in line for line in last.values())
    assert time.monotonic() - began < 100
    relays[0].close()
