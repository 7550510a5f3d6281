"""Links between ranks that are cut: in network namespaces, where the system lets us make one (Linux, as root)."""

from __future__ import annotations

import ipaddress
import itertools
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from parlay import models
from parlay.options import LoadOptions, RankOptions
from parlay.ranks.leader import Leader
from parlay.ranks.starting import lead
from parlay.ranks.wire import SECRET
from parlay.testing.checkpoints import save_random
from parlay.types import Runner, RunnerLost, Segment
from tests.ranks.conftest import Crew

LOAD = LoadOptions(dtype="float32", device="cpu", threads=1)
numbers = itertools.count()
LINKS = 1 << 15
"""So many addresses of four are kept for tests of networks: 198.18.0.0/15 (RFC 2544)."""
SECONDS = 10.0
TEXT = tuple(range(1, 40))


class Link(NamedTuple):
    """A link from this machine's ``end`` at the address ``here`` to a namespace."""

    end: str
    here: str


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def link(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    """A link to a namespace in which the crew's ranks then run. Namespaces go some time after they are deleted."""
    number, process = next(numbers), os.getpid()
    name, near, far = f"parlay{process}-{number}", f"pn{process}-{number}", f"pf{process}-{number}"
    first = ipaddress.IPv4Address("198.18.0.0") + 4 * ((8 * process + number) % LINKS)  # not those of a process beside
    here, there = str(first + 1), str(first + 2)
    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("network namespaces can't be made here")
    try:
        ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        for where, end, address in ((), near, here), (("-n", name), far, there):
            ip(*where, "addr", "add", f"{address}/30", "dev", end)
            ip(*where, "link", "set", end, "up")
        monkeypatch.setenv(SECRET, "a-secret-of-the-ranks")
        crew.namespace = name
        yield Link(near, here)
        ip("link", "delete", near)
    finally:
        ip("netns", "delete", name)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_random("llama", folder)
    return folder


def begun(crew: Crew, link: Link, model: Path, seconds: float = SECONDS, **split: int) -> Leader:
    options = RankOptions(rank_listen=f"{link.here}:0", rank_timeout=seconds, **split)
    runner = lead(str(model), LOAD, options, cache_tokens=512, start=crew.start)
    logits(runner)
    return runner


def logits(runner: Runner) -> Tensor:
    """Of all rows of the text, computed anew."""
    runner.open(1, TEXT)
    assert runner.reserve(1, 64)
    out = runner.forward([Segment(1, TEXT)]).logits_RV
    runner.release(1)
    return out


def for_ever(runner: Runner) -> None:
    while True:
        logits(runner)


@pytest.mark.parametrize("split", [{"pipeline_parallel": 2}, {"context_parallel": 2}], ids=str)
def test_a_cut_link_ends_both_sides_with_one_line_in_bounded_time(
    crew: Crew, link: Link, llama: Path, split: dict[str, int]
) -> None:
    """No rows come back from a forward that the cut took part in, and none ever after."""
    runner = begun(crew, link, llama, **split)
    crew.said()
    ip("link", "set", link.end, "down")
    began = time.monotonic()
    with pytest.raises(RunnerLost) as lost:
        for_ever(runner)
    assert "\n" not in str(lost.value)
    assert "rank 1" in str(lost.value)
    _, line = crew.said()
    assert line.startswith("rank 1 ends: rank 0")
    assert time.monotonic() - began < 30 * SECONDS, "not the quarter of an hour after which TCP gives up"
    with pytest.raises(RunnerLost):
        runner.forward([Segment(1, TEXT)])
    again = models.load(str(llama), LOAD, cache_tokens=512)
    assert logits(again).shape == (len(TEXT), again.spec.vocab_size), "this process goes on with another runner"


def test_a_link_that_comes_back_in_time_changes_no_bit(crew: Crew, link: Link, llama: Path) -> None:
    """What was under way is sent again by the network, as on a link that is slow."""
    runner = begun(crew, link, llama, seconds=600, pipeline_parallel=2)
    expected = logits(models.load(str(llama), LOAD, cache_tokens=512))
    ip("link", "set", link.end, "down")
    back = threading.Timer(SECONDS / 6, ip, ("link", "set", link.end, "up"))
    began = time.monotonic()
    back.start()
    found = logits(runner)
    assert time.monotonic() - began > SECONDS / 6, "the forward waited for the link"
    back.join()
    assert torch.equal(found, expected)
    runner.close()
