"""Whatever goes wrong with a rank, all of them end within a bounded time, each with one line that says why."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from parlay import LLM, models
from parlay.models.part import Loss
from parlay.options import LoadOptions, RankOptions, UsageError
from parlay.ranks.groups import SocketGroup, make_shared_file
from parlay.ranks.leader import Followers, Leader
from parlay.ranks.starting import lead, ranks_ended_on_error
from parlay.ranks.wire import SECRET
from parlay.testing.checkpoints import save_random
from parlay.types import ParlayError, RunnerLost, Segment
from tests.ranks.conftest import Crew

LOAD = LoadOptions(dtype="float32", device="cpu", threads=1)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_random("llama", folder)
    return folder


def lead_two_by_two(crew: Crew, model: Path, seconds: float = 300) -> Leader:
    options = RankOptions(tensor_parallel=2, pipeline_parallel=2, rank_timeout=seconds)
    runner = lead(str(model), LOAD, options, cache_tokens=512, start=crew.start)
    runner.open(1, range(1, 40))
    runner.reserve(1, 64)
    runner.forward([Segment(1, tuple(range(1, 40)))])
    return runner


def forward_until_lost(runner: Leader) -> str:
    with pytest.raises(RunnerLost) as lost:
        _forward_for_ever(runner)
    return str(lost.value)


def _forward_for_ever(runner: Leader) -> None:
    while True:
        runner.forward([Segment(1, tuple(range(1, 40)))])


@pytest.mark.parametrize("victim", range(3))
def test_a_killed_rank_ends_all(crew: Crew, llama: Path, victim: int) -> None:
    """Rank 0 raises, and the other two say why they end, long before the ranks' timeout."""
    runner = lead_two_by_two(crew, llama)
    processes = [crew.said()[0] for _ in range(3)]
    began = time.monotonic()
    os.kill(processes[victim], signal.SIGKILL)
    assert "has ended" in forward_until_lost(runner)
    last = dict(crew.said() for _ in range(2))
    assert last.keys() == {*processes} - {processes[victim]}
    assert all("ends: rank" in line for line in last.values())
    assert time.monotonic() - began < 200
    with pytest.raises(RunnerLost):
        runner.forward([Segment(1, (1,))])


def test_a_rank_that_hangs_ends_all(crew: Crew, llama: Path) -> None:
    """Its silence is noticed in a forward, within the ranks' timeout."""
    runner = lead_two_by_two(crew, llama, seconds=8)
    processes = [crew.said()[0] for _ in range(3)]
    os.kill(processes[0], signal.SIGSTOP)
    try:
        assert "8 s" in forward_until_lost(runner)
        last = dict(crew.said() for _ in range(2))
        assert last.keys() == {*processes[1:]}
    finally:
        os.kill(processes[0], signal.SIGKILL)  # ends one that is stopped, too


def test_ranks_end_when_rank_0_is_gone(crew: Crew, llama: Path) -> None:
    """A leader that dies says nothing: its connections tell."""
    os.kill(crew.lead(llama), signal.SIGKILL)
    assert all("ends: rank 0 has ended" in crew.said()[1] for _ in range(3))


def test_while_a_model_loads_no_file_is_left_to_one_that_is_killed(
    crew: Crew, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks have opened their memory by then, and its file is gone."""
    made: list[Path] = []

    def make(count: int) -> Path:
        made.append(make_shared_file(count))
        return made[-1]

    def load(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("parlay.ranks.starting.make_shared_file", make)
    monkeypatch.setattr("parlay.ranks.starting.models.load", load)
    monkeypatch.setattr(Followers, "close", lambda _: left.extend(file for file in made if file.exists()))
    left: list[Path] = []
    with pytest.raises(ZeroDivisionError):
        lead(str(llama), LOAD, RankOptions(tensor_parallel=2), start=crew.start)
    assert len(made) == 1
    assert not left


def test_an_interrupt_of_rank_0_is_its_end_to_the_others(
    crew: Crew, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("parlay.ranks.starting.models.load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lead(str(llama), LOAD, RankOptions(tensor_parallel=2), start=crew.start)
    crew.said()
    assert "rank 0 has ended" in crew.said()[1]


def test_ranks_with_other_weights_are_refused(crew: Crew, llama: Path, tmp_path: Path) -> None:
    save_random("llama", tmp_path, seed=1)
    crew.model = str(tmp_path)
    with pytest.raises(ParlayError, match=r"has other weights on the rank at 127.0.0.1 than on rank 0"):
        lead(str(llama), LOAD, RankOptions(tensor_parallel=2), start=crew.start)
    crew.said()
    assert "has other weights" in crew.said()[1]


def test_rank_0_that_waits_refuses_a_rank_that_differs_and_takes_the_next(
    crew: Crew, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one line on both sides."""
    monkeypatch.setenv(SECRET, "a-secret-of-the-ranks")
    save_random("llama", tmp_path, seed=1)
    lines: list[str] = []

    def start(leader: tuple[str, int], count: int, secret: bytes) -> list[object]:
        crew.model = str(tmp_path)
        crew.start(leader, count, secret)

        def next_one() -> None:
            lines.extend(crew.said()[1] for _ in range(2))
            crew.model = str(llama)
            crew.start(leader, count, secret)

        threading.Thread(target=next_one).start()
        return []

    options = RankOptions(tensor_parallel=2, rank_listen="127.0.0.1:0")
    runner = lead(str(llama), LOAD, options, cache_tokens=512, start=start)  # type: ignore[arg-type]
    assert lines[0] == "joins"
    assert "has other weights on the rank at 127.0.0.1 than on rank 0" in lines[1]
    (record,) = [each for each in caplog.records if "was refused" in each.message]
    assert "has other weights" in record.message
    runner.close()


def test_a_rank_too_many_harms_nobody(crew: Crew, llama: Path) -> None:
    """It ends with one line, and the group works without it; an error in making an LLM ends the group."""

    def start(leader: tuple[str, int], count: int, secret: bytes) -> list[subprocess.Popen[bytes]]:
        return crew.start(leader, count + 1, secret)

    runner = lead(str(llama), LOAD, RankOptions(tensor_parallel=2), cache_tokens=512, start=start)
    lines = [crew.said()[1] for _ in range(3)]
    assert lines.count("joins") == 2
    runner.open(1, range(1, 40))
    runner.reserve(1, 64)
    runner.forward([Segment(1, tuple(range(1, 40)))])
    with pytest.raises(ZeroDivisionError), ranks_ended_on_error(runner):
        raise ZeroDivisionError
    assert crew.said()[1] == "is done"


def test_ranks_of_other_versions_are_refused(crew: Crew, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parlay.ranks.starting.build_name", lambda: "parlay 0.0")
    with pytest.raises(ParlayError, match="run the same version"):
        lead(str(llama), LOAD, RankOptions(tensor_parallel=2), start=crew.start)
    crew.said()
    assert "run the same version" in crew.said()[1]


def test_ranks_that_do_not_know_the_secret_are_sent_away(
    crew: Crew, llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """So is what speaks another protocol. Neither gets a byte of a plan, and rank 0 logs a line of each. It goes on
    waiting for a rank that knows the secret."""
    said: list[str] = []

    def knock(leader: tuple[str, int], secret: bytes) -> None:
        with socket.create_connection(leader) as stranger, suppress(ConnectionResetError):
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + 100 * b"x")
            while stranger.recv(1024):
                pass
        crew.start(leader, 1, b"another-secret-of-the-ranks")
        said.extend(crew.said()[1] for _ in range(2))
        crew.start(leader, 1, secret)

    def start(leader: tuple[str, int], _: int, secret: bytes) -> list[subprocess.Popen[bytes]]:
        threading.Thread(target=knock, args=(leader, secret)).start()
        return []

    lead(str(llama), LOAD, RankOptions(tensor_parallel=2, rank_timeout=600), start=start).close()
    assert f"is {SECRET} the same on both?" in said[1]
    lines = [record.getMessage() for record in caplog.records if "was ended" in record.getMessage()]
    assert lines == [
        "the connection of 127.0.0.1 was ended: it is not a rank of a model, or one of another version",
        "the connection of 127.0.0.1 was ended: it does not know the secret",
    ]


def test_one_process_waits_for_none(llama: Path) -> None:
    with pytest.raises(ValueError, match=r"rank_listen=127\.0\.0\.1:0: the model runs in one process"):
        LLM(str(llama), ranks=RankOptions(rank_listen="127.0.0.1:0"))


def test_nobody_joins(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "a secret of the ranks")
    line = "0 of 1 other ranks have joined within 1 s: start them with parlay rank --join"
    with pytest.raises(ParlayError, match=line):
        lead(str(llama), LOAD, RankOptions(tensor_parallel=2, rank_listen="127.0.0.1:0", rank_timeout=1))


def test_what_can_not_be_had_is_said_before_anything_starts(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(options: RankOptions, load: LoadOptions = LOAD) -> str:
        with pytest.raises(ParlayError) as error:
            lead(str(llama), load, options)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "has 2 key heads" in refused(RankOptions(tensor_parallel=3))
    assert "has 3 layers" in refused(RankOptions(pipeline_parallel=4))
    assert f"put one into {SECRET}" in refused(RankOptions(tensor_parallel=2, rank_listen="127.0.0.1:0"))
    monkeypatch.setenv(SECRET, "short")
    assert "at least 16" in refused(RankOptions(tensor_parallel=2, rank_listen="127.0.0.1:0"))
    monkeypatch.setenv(SECRET, "a secret of the ranks")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"can't wait for ranks at {where}" in refused(RankOptions(tensor_parallel=2, rank_listen=where))
    assert "is not HOST:PORT" in refused(RankOptions(tensor_parallel=2, rank_listen="here"))
    with pytest.raises(UsageError, match="too many processes: use at most 64"):
        RankOptions(tensor_parallel=16, pipeline_parallel=16)
    with pytest.raises(UsageError, match="pipeline_parallel can't be used with context_parallel"):
        RankOptions(pipeline_parallel=2, context_parallel=2)


@pytest.mark.parametrize(
    ("options", "split"), [(RankOptions(pipeline_parallel=2), "pipeline"), (RankOptions(context_parallel=2), "context")]
)
def test_stages_and_shared_texts_need_the_compiled_decoder(
    crew: Crew, llama: Path, options: RankOptions, split: str
) -> None:
    """One line on every rank, for they all load."""
    load = LoadOptions(dtype="float64", device="cpu", threads=1)
    with pytest.raises(models.UnsupportedModel, match=f"{split} parallelism needs the compiled decoder"):
        lead(str(llama), load, options, start=crew.start)
    crew.said()
    assert f"{split} parallelism needs the compiled decoder" in crew.said()[1]


def test_a_killed_rank_that_shares_texts_ends_both(crew: Crew, llama: Path) -> None:
    runner = lead(
        str(llama), LOAD, RankOptions(context_parallel=2, rank_timeout=300), cache_tokens=512, start=crew.start
    )
    runner.open(1, range(1, 40))
    runner.reserve(1, 64)
    process, _ = crew.said()
    os.kill(process, signal.SIGKILL)
    assert "rank 1 has ended" in forward_until_lost(runner)


def test_an_interrupt_amid_a_sum_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can't pass through the library, which would go on with the numbers of this rank alone. No garbage is collected
    there: to free a model waits until no forward runs."""
    group, numbers, collects = SocketGroup({}, (0, 1), 0), (ctypes.c_float * 4)(1, 2, 3, 4), list[bool]()

    def interrupted(rank: int, own: object) -> None:
        collects.append(gc.isenabled())
        raise KeyboardInterrupt

    monkeypatch.setattr(group, "_swap", interrupted)
    assert group.struct.sum(numbers, 4) == 1
    assert group.loss == Loss(0, "rank 0 was interrupted (KeyboardInterrupt)")
    assert (collects, gc.isenabled()) == ([False], True)
