"""The decoder's pool of threads: late threads, callers in several threads, forks and interrupts change no bit."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parlay import models
from parlay.compiled.build import LIBRARY
from parlay.compiled.library import NotLoaded, load
from parlay.options import LoadOptions
from parlay.system import threads
from parlay.testing.checkpoints import save_random
from parlay.types import Runner, Segment, Tree

try:
    load()
except NotLoaded as reason:
    pytest.skip(f"no compiled decoder: {reason}", allow_module_level=True)

Delay = Callable[[int, int, int], None]
TEXT = tuple(5 + place % 55 for place in range(70))


@pytest.fixture(scope="module")
def runner() -> Runner:
    return models.load("parlay-mini")


@pytest.fixture
def delay() -> Iterator[Delay]:
    """Makes thread number N sleep for M microseconds in every K-th piece, after computing and before committing it."""
    set_delay = ctypes.CDLL(str(LIBRARY)).parlay_pool_delay
    set_delay.argtypes = [ctypes.c_int64] * 3
    yield set_delay
    set_delay(-1, 1, 0)


def logits(runner: Runner, name: int = 1) -> Tensor:
    """Logits of a prompt in two chunks, a token, and a tree below it."""
    runner.open(name, ())
    try:
        assert runner.reserve(name, 100)
        parts = [TEXT[:40], TEXT[40:69], TEXT[69:]]
        found = []
        for part in parts:
            tree = Tree((7, 8, 9), (-1, 0, 0)) if part is parts[-1] else Tree((), ())
            found.append(runner.forward([Segment(name, part, tree)]).logits_RV)
            runner.keep(name, ())
        return torch.cat(found)
    finally:
        runner.release(name)


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize(("every", "microseconds"), [(1, 300), (3, 2000), (7, 20)])
def test_a_thread_that_is_late_changes_no_bit(
    runner: Runner, delay: Delay, late: int, every: int, microseconds: int
) -> None:
    with threads.using(1):
        expected = logits(runner)
    with threads.using(3):
        delay(late, every, microseconds)
        assert torch.equal(logits(runner), expected)


def test_a_thread_that_is_late_changes_no_bit_of_experts(delay: Delay, tmp_path: Path) -> None:
    """Each layer groups rows by experts anew, while a late thread may still read how the layer before grouped them."""
    save_random("gpt-oss", tmp_path)
    runner = models.load(str(tmp_path), LoadOptions(dtype="float32", device="cpu"), cache_tokens=256)
    with threads.using(1):
        expected = logits(runner)
    with threads.using(3):
        delay(1, 3, 500)
        assert all(torch.equal(logits(runner), expected) for _ in range(5))


def test_a_forward_does_not_wait_for_a_thread_that_is_late(runner: Runner, delay: Delay) -> None:
    """One thread sleeps for a second in each of its pieces, some fifty in a forward of this model."""
    with threads.using(2):
        delay(1, 1, 1_000_000)
        began = time.perf_counter()
        logits(runner)
        assert time.perf_counter() - began < 25  # not the fifty seconds of all its pieces


def test_processes_beside_change_no_bit(runner: Runner) -> None:
    """For long enough that the pool sees its threads lose their cores, and shortens its waits."""
    with threads.using(1):
        expected = logits(runner)
    beside = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        with threads.using(2):
            until = time.monotonic() + 1
            while time.monotonic() < until:
                assert torch.equal(logits(runner), expected)
    finally:
        for each in beside:
            each.kill()
            each.wait()


def test_models_share_the_pool_and_any_thread_may_ask(runner: Runner) -> None:
    expected, other = logits(runner), models.load("parlay-mini-draft")
    theirs = logits(other)
    wrong: list[str] = []

    def ask(which: Runner, right: Tensor) -> None:
        for _ in range(20):
            if not torch.equal(logits(which), right):
                wrong.append(which.spec.name)

    with threads.using(2):
        asking = [threading.Thread(target=ask, args=pair) for pair in ((runner, expected), (other, theirs))]
        for each in asking:
            each.start()
        for each in asking:
            each.join(600)
            assert not each.is_alive()
    assert not wrong


FORKED_AND_INTERRUPTED = """
import ctypes, os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
sys.path.insert(0, {tests!r})
from test_pool import logits, models, threads, torch
runner = models.load("parlay-mini")
threads.use(2)
expected = logits(runner)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(logits(runner), expected) else 3)
assert torch.equal(logits(runner), expected)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
delay = ctypes.CDLL({library!r}).parlay_pool_delay
delay.argtypes = [ctypes.c_int64] * 3
other, began = models.load("parlay-mini"), threading.Event()
def be_busy():
    logits(other)
    delay(0, 1, 1_000_000)
    began.set()
    logits(other)
busy = threading.Thread(target=be_busy)
busy.start()
began.wait()
time.sleep(0.5)
child = os.fork()  # amid a job of the other thread, which the child does not have
if child == 0:
    signal.alarm(600)
    delay(-1, 1, 0)
    os._exit(0 if torch.equal(logits(runner), expected) else 3)
delay(-1, 1, 0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
busy.join()
try:
    print("ready", flush=True)
    while True:
        logits(runner)
except KeyboardInterrupt:
    sys.exit(0 if torch.equal(logits(runner, 2), expected) else 3)
"""


def test_a_fork_may_decode_on_and_an_interrupt_ends_what_it_should() -> None:
    """And nothing hangs."""
    code = FORKED_AND_INTERRUPTED.format(tests=os.path.dirname(__file__), library=str(LIBRARY))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(600) == 0
    finally:
        process.kill()


def test_how_the_callers_thread_treats_small_numbers_changes_no_bit(tmp_path: Path) -> None:
    """Other libraries let the thread that loads them take numbers below float32's normal range for zeros."""
    save_random("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * 1e-40
    weights["lm_head.weight"] = weights["lm_head.weight"] * 1e10
    save_file(weights, tmp_path / "small.safetensors")
    (tmp_path / "small.safetensors").replace(tmp_path / "model.safetensors")
    small = models.load(str(tmp_path), LoadOptions(dtype="float32"))
    expected = logits(small)
    assert expected.any()
    try:
        assert torch.set_flush_denormal(True)
        assert torch.equal(logits(small), expected)
    finally:
        torch.set_flush_denormal(False)


def test_weights_may_go_while_a_thread_is_late(delay: Delay) -> None:
    """A late thread still reads what it was given: freeing that waits for it."""
    with threads.using(2):
        for _ in range(3):
            short_lived = models.load("parlay-mini")
            delay(1, 1, 50_000)
            logits(short_lived)
            del short_lived
            delay(-1, 1, 0)
