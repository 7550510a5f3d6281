"""Real processes: a gateway's command line, and replicas that are killed, stopped and told to end."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from parlay.cli import main, parser_of
from parlay.cli.replica_process import ReplicaProcess, run_replica
from parlay.cli.serve_replicas import Processes, check_replicas

DEADLINE = 600
"""Seconds after which a test fails: processes of ranks are slow on cores that others use."""
BODY: dict[str, Any] = {"model": "parlay-mini", "stream": True, "ignore_eos": True}


@contextmanager
def started(*words: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A command that listens on a free port: its process, its address, and the lines of its log so far."""
    command = [sys.executable, "-m", "parlay", *words, "--port", "0", "--log-level", "info"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        log: list[str] = []
        reader = threading.Thread(target=log.extend, args=(process.stderr,), daemon=True)
        reader.start()
        timer = threading.Timer(DEADLINE, process.kill)
        timer.start()
        try:
            yield process, process.stdout.readline().split()[-1], log
        finally:
            timer.cancel()
            process.terminate()
            try:
                process.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                process.kill()


def texts(url: str, count: int, during: Any = None, tokens: int = 600) -> list[str]:
    """What so many streams say at once; ``during`` is called when all have begun."""
    found, begun = [""] * count, threading.Barrier(count + 1)

    def ask(number: int) -> None:
        body = {**BODY, "prompt": f"Number {number}", "seed": number, "max_tokens": tokens}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=DEADLINE) as answer:
            assert answer.status_code == 200
            for place, line in enumerate(answer.iter_lines()):
                if place == 8:
                    begun.wait(DEADLINE)
                if line.startswith("data: {"):
                    found[number] += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    begun.wait(DEADLINE)
    if during is not None:
        during()
    for thread in threads:
        thread.join(DEADLINE)
    return found


@pytest.mark.slow
def test_replicas_killed_and_stopped_lose_nothing_and_come_back() -> None:
    with started("serve", "parlay-mini", "--replicas", "2", "--router-memory", "off") as (process, url, log):

        def numbers() -> list[int]:
            return [int(found[1]) for line in log if (found := re.search(r"replica \d is process (\d+)", line))]

        def ready_after(epochs: int) -> None:
            while len(numbers()) < epochs:
                time.sleep(0.05)
            ready(url)

        expected = texts(url, 6)
        assert texts(url, 6, lambda: os.kill(numbers()[0], signal.SIGKILL)) == expected
        ready_after(3)
        assert texts(url, 6, lambda: os.kill(numbers()[1], signal.SIGSTOP)) == expected
        os.kill(numbers()[1], signal.SIGKILL)
        ready_after(4)
        assert texts(url, 6, lambda: os.killpg(process.pid, signal.SIGHUP)) == expected  # as a shell does
        assert process.stdout is not None
        while "all are new" not in process.stdout.readline():
            pass

        def twice() -> None:  # the second comes while the first is under way
            process.send_signal(signal.SIGHUP)
            time.sleep(0.5)
            process.send_signal(signal.SIGHUP)

        assert texts(url, 6, twice) == expected
        ready_after(9)
        assert texts(url, 6, process.terminate) == expected  # it drains
        assert process.wait(DEADLINE) == 0
        for number in numbers():
            with pytest.raises(ProcessLookupError):
                os.kill(number, 0)
        assert "parlay_gateway_streams_broken_total 0.0" not in "".join(log)


def ready(url: str) -> None:
    """Wait until all replicas are ready."""
    while set(httpx.get(f"{url}/health").json()["replicas"].values()) != {"ready"}:
        time.sleep(0.05)


@pytest.mark.slow
def test_replicas_end_when_their_terminal_is_closed() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        words = ("serve", "parlay-mini", "--replicas", "2", "--router-memory", "off", "--port", "0")
        os.execv(sys.executable, [sys.executable, "-m", "parlay", *words])
    said = b""
    while b"http" not in said:
        said += os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.slow
def test_replicas_outlive_the_process_that_forks_them_and_leave_nothing_when_their_parent_is_killed() -> None:
    """They serve until others take their places, one after another."""
    with started("serve", "parlay-mini", "--replicas", "2", "--router-memory", "off") as (process, url, log):

        def found(pattern: str) -> list[str]:
            return [match[1] for line in log if (match := re.search(pattern, line))]

        ready(url)
        expected = texts(url, 4)
        forks = Path(f"/proc/{found('is process ([0-9]+)')[0]}/stat").read_text().rpartition(")")[2].split()[1]
        assert texts(url, 4, lambda: os.kill(int(forks), signal.SIGKILL)) == expected
        assert process.stdout is not None
        while "all are new" not in process.stdout.readline():
            assert set(httpx.get(f"{url}/health").json()["replicas"].values()) == {"ready"}
        assert texts(url, 4) == expected
        folder = Path(found("unix:(.*) is ready")[0]).parent
        assert folder.is_dir()
        process.kill()
        while folder.exists():
            time.sleep(0.05)


DEAF = """
import signal
set_handler = signal.signal
set_handler(signal.SIGTERM, signal.SIG_IGN)
signal.signal = lambda number, handler: None if number == signal.SIGTERM else set_handler(number, handler)
"""
"""Python's start-up file by which a process ignores SIGTERM."""


@pytest.mark.slow
@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGKILL], ids=["stopped", "killed"])
def test_replicas_that_hang_are_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: signal.Signals
) -> None:
    (tmp_path / "sitecustomize.py").write_text(DEAF)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    words = ("serve", "parlay-mini", "--replicas", "2", "--router-memory", "off", "--drain-seconds", "0")
    with started(*words) as (process, url, log):
        ready(url)
        numbers = [int(found[1]) for line in log if (found := re.search(r"replica \d is process (\d+)", line))]
        try:
            process.send_signal(told)
            end = time.monotonic() + 60
            while any(Path(f"/proc/{number}").exists() for number in numbers):
                assert time.monotonic() < end, "a replica was left behind"
                time.sleep(0.05)
        finally:
            for number in numbers:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)


def test_a_replica_whose_parent_was_killed_while_it_started_ends_in_silence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its folder of sockets is gone by the time it could say that it is ready."""
    (folder := tmp_path / "sockets").mkdir()
    _, says = Pipe(duplex=False)
    options = parser_of("serve").parse(["parlay-mini", "--router-memory", "off"])
    replica = get_context("spawn").Process(target=run_replica, args=(options, str(folder / "1"), says))
    replica.start()
    says.close()
    while not (found := list(folder.iterdir())):
        assert replica.is_alive()
        time.sleep(0.01)
    gone = folder.rename(tmp_path / "gone")
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(gone / found[0].name)), timeout=DEADLINE) as client:
        assert client.get("http://localhost/health").status_code == 200
    replica.terminate()
    replica.join(DEADLINE)
    assert (replica.exitcode, "Traceback" in capfd.readouterr().err) == (0, False)


class Beginning(Processes):
    """Replicas whose processes the test begins."""

    def __init__(self, count: int, fleet: Any) -> None:
        super().__init__(Namespace(), [f"socket-{place}" for place in range(count)], fleet, 0, "")
        self.says: list[Connection] = []
        self._running = {place: self._begin(place) for place in range(count)}

    def _begin(self, place: int) -> ReplicaProcess:
        news, says = Pipe(duplex=False)
        self.says.append(says)
        says.send(None)
        process: Any = SimpleNamespace(is_alive=lambda: True, sentinel=0, pid=os.getpid(), terminate=lambda: None)
        return ReplicaProcess(process, news)


def test_replicas_without_their_fork_server_serve_until_others_are_ready() -> None:
    """Only one that has ended itself counts as lost."""
    lost: list[int] = []
    fleet: Any = SimpleNamespace(report_new=lambda place: None, report_loss=lambda place, why: lost.append(place))
    processes = Beginning(3, fleet)
    processes._mend()
    old = dict(processes._running)
    for one in old.values():
        one.process.is_alive = lambda: False
    processes.says[2].close()
    for _ in range(4):
        processes._mend()
        processes._start_anew()
    assert lost == [2]
    assert all(processes._running[place] is not old[place] for place in old)
    assert not processes._leaving


@pytest.mark.slow
def test_a_replica_that_is_stopped_and_wakes_up_says_nothing_twice() -> None:
    replicas = [started("serve", "parlay-mini", "--router-memory", "off") for _ in range(2)]
    with ExitStack() as stack:
        processes = [stack.enter_context(each) for each in replicas]
        urls = [word for _, url, _ in processes for word in ("--replica", url)]
        _, url, log = stack.enter_context(started("gateway", *urls, "--health-seconds", "2"))
        ready(url)
        expected = texts(url, 6)

        def wake() -> None:
            while not any("replica 1 at" in line and "is lost" in line for line in log):
                time.sleep(0.05)
            processes[0][0].send_signal(signal.SIGCONT)

        waking = threading.Thread(target=wake)
        assert texts(url, 6, lambda: (processes[0][0].send_signal(signal.SIGSTOP), waking.start())) == expected
        waking.join()
        ready(url)
        assert texts(url, 6) == expected
        metrics = httpx.get(f"{url}/metrics").text
        assert "parlay_gateway_streams_broken_total 0.0" in metrics
        assert "parlay_gateway_streams_resumed_total 0.0" not in metrics


@pytest.mark.slow
def test_servers_of_ranks_go_on_with_each_others_streams_when_a_rank_is_killed() -> None:
    words = ("serve", "parlay-mini", "--tensor-parallel", "2", "--dtype", "float32", "--router-memory", "off")
    with ExitStack() as stack:
        servers = [stack.enter_context(started(*words)) for _ in range(2)]
        _, url, _ = stack.enter_context(
            started("gateway", *(word for _, url, _ in servers for word in ("--replica", url)))
        )
        ready(url)
        expected = texts(url, 6, tokens=100)

        def kill() -> None:
            (rank,) = children(servers[0][0].pid)
            os.kill(rank, signal.SIGKILL)

        assert texts(url, 6, kill, tokens=100) == expected
        assert any("rank 1" in line for line in servers[0][2])
        ready(url)  # it loads the model again
        assert texts(url, 6, tokens=100) == expected
        assert "parlay_gateway_streams_broken_total 0.0" in httpx.get(f"{url}/metrics").text


def children(process: int) -> list[int]:
    """Ranks that a server has started. Its other threads and processes may end meanwhile."""
    found: list[str] = []
    for task in Path(f"/proc/{process}/task").iterdir():
        with suppress(OSError):
            found += (task / "children").read_text().split()
    return [int(each) for each in found if is_rank(Path(f"/proc/{each}/cmdline"))]


def is_rank(command: Path) -> bool:
    with suppress(OSError):
        return "rank" in command.read_text().split("\0")
    return False


@pytest.mark.slow
def test_a_drafter_that_is_stopped_under_load_holds_no_stream_up() -> None:
    drafter = started("serve", "parlay-mini", "--drafter-only", "--strategy", "prompt-lookup")
    with drafter as (process, drafts, _):
        remote = f"remote:url={drafts},policy=fixed,retry_s=0.5"
        with started("serve", "parlay-mini", "--router-memory", "off", "--strategy", remote) as (_, url, log):

            def asked() -> int:
                return int(httpx.get(f"{drafts}/stats").json()["requests"])

            expected = texts(url, 6)
            before = asked()
            assert before
            assert texts(url, 6, lambda: process.send_signal(signal.SIGSTOP)) == expected
            assert texts(url, 6) == expected
            process.send_signal(signal.SIGCONT)
            while asked() == before or not any("answers again" in line for line in log):
                assert texts(url, 6) == expected
            assert texts(url, 6) == expected


def test_a_replica_that_can_not_start_ends_everything_with_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no-such-model/at-all", "--replicas", "2", "--port", "0"]) == 1
    error = capfd.readouterr().err.splitlines()
    assert len([line for line in error if line.startswith("parlay: error:")]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--replicas", "0"], "must be between 1 and 64"),
        (["--replicas", "65"], "must be between 1 and 64"),
        (["--replicas", "2", "--allow-pull"], "can't be used with --replicas"),
        (["--replicas", "2", "--drafter-only"], "can't be used with --replicas"),
        (["--replicas", "2", "--record", "folder"], "can't be used with --replicas"),
        (["--replicas", "2", "--lora-folder", "folder"], "--lora-folder can't be used with --replicas"),
    ],
)
def test_flags_that_several_processes_can_not_honour(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_replicas(parser_of("serve").parse(words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--replica must be given 1 to 256 times, got 0"),
        (["--replica", "localhost:8000"], "give the address of a server"),
        (["--replica", "http://h", "--replica", "http://h:80/"], "the same --replica is given twice"),
        (["--replica", "http://h", "--health-seconds", "0"], "--health-seconds must be above 0, got 0"),
        (["--replica", "http://h", "--retries", "-1"], "retries"),
        (["--replica", "http://h", "--port", "70000"], "--port must be between 0 and 65535"),
    ],
)
def test_wrong_flags_of_a_gateway_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gateway", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_gateway_starts_without_torch_and_without_the_engine() -> None:
    modules = "parlay.cli.gateway, parlay.gateway.app, parlay.serve.graceful"
    loaded = f"import {modules}, sys; print(*sorted({{'torch', 'fastapi', 'parlay.engine'}} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", loaded], text=True).strip() == ""
