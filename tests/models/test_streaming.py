"""Layers that are read from disk in every forward: the bits of a model in memory, or one clear line."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from parlay import LLM, SamplingParams, models
from parlay.cache import Budget
from parlay.compiled.library import SWITCH, NotLoaded, load
from parlay.cost.timing import calibrate
from parlay.models.compiled import streaming
from parlay.models.compiled.streaming import LayersLost
from parlay.models.config import UnsupportedModel
from parlay.models.native import NativeRunner
from parlay.options import LoadOptions, UsageError
from parlay.system import threads
from parlay.testing.checkpoints import save_random
from parlay.types import ParlayError, RunnerLost, Segment, Tree
from tests.models import gguf_files

TEXT = tuple(range(5, 45))
TREE = Tree((7, 8, 9, 10, 11), (-1, 0, 0, 2, -1))
PROMPT = "Once upon a time there was a cat. Once upon a time there was"


@pytest.fixture(autouse=True)
def library() -> None:
    try:
        load()
    except NotLoaded as reason:
        pytest.skip(str(reason))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packed layers go."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "parlay" / "layers"


def opened(model: Path | str, room: int | None = None, options: LoadOptions | None = None) -> NativeRunner:
    wanted = options or LoadOptions(device="cpu")
    runner = models.load(str(model), wanted, cache_tokens=512, budget=Budget(weights=room))
    assert isinstance(runner, NativeRunner)
    return runner


def least(model: Path | str, options: LoadOptions | None = None) -> int:
    """The least room that the model's weights can have, as it says itself."""
    with pytest.raises(ParlayError, match=r"allow \d+ bytes or more") as refused:
        opened(model, 1, options)
    return int(re.findall(r"allow (\d+) bytes", str(refused.value))[0])


def logits(runner: NativeRunner, skip: frozenset[tuple[str, int]] = frozenset()) -> Tensor:
    """Logits of a text, then of a tree behind it, then of a row."""
    name = next(_NAMES)
    runner.open(name, TEXT[:1])
    try:
        assert runner.reserve(name, len(TEXT) + 2 + len(TREE))
        found = [runner.forward([Segment(name, TEXT)]).logits_RV]
        runner.keep(name, ())
        found.append(runner.forward([Segment(name, (5,), TREE)], skip=skip).logits_RV)  # type: ignore[arg-type]
        found.append(runner.forward([Segment(name, (6,))]).logits_RV)
        return torch.cat(found)
    finally:
        runner.release(name)


_NAMES = itertools.count()


def stream_of(runner: NativeRunner) -> streaming.LayerStream:
    weights = runner._forward._weights  # type: ignore[attr-defined]
    assert weights.streamed is not None
    found = weights.streamed.stream
    assert isinstance(found, streaming.LayerStream)
    return found


def layers_of(runner: NativeRunner) -> int:
    """How many layers every forward reads from disk."""
    return len(stream_of(runner).split.streamed) if runner.spec.streamed_bytes else 0


def file_in(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


@pytest.mark.parametrize("family", ["llama", "gemma4-e", "olmo3"])
def test_bits_are_those_of_a_model_in_memory(family: str, tmp_path: Path, folder: Path) -> None:
    save_random(family, tmp_path / family)
    expected, room = logits(opened(tmp_path / family)), least(tmp_path / family)
    for _ in range(2):  # packed now, and read from the file of before
        runner = opened(tmp_path / family, room)
        assert layers_of(runner) >= 3
        assert torch.equal(logits(runner), expected)
        assert torch.equal(logits(runner), expected)
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("asked", [{"dtype": "bfloat16"}, {"quantize": "int8"}])
def test_bits_in_every_form_of_weights(asked: dict[str, str], folder: Path) -> None:
    """Step sizes of int8 are in the file, too."""
    options = LoadOptions(device="cpu", **asked)  # type: ignore[arg-type]
    model = "parlay-mini"
    expected, room = logits(opened(model, None, options)), least(model, options)
    for each in (room, room, room + 1_000_000, room + 3_000_000):
        assert torch.equal(logits(opened(model, each, options)), expected)
    assert len(list(folder.iterdir())) == 1, "one file, whatever the room"


def test_bits_of_a_file_in_blocks(tmp_path: Path, folder: Path) -> None:
    save_random("qwen2", tmp_path)
    written = gguf_files.write(tmp_path / "model.gguf", tmp_path, kind=Kind.Q8_0)
    expected = logits(opened(written))
    assert torch.equal(logits(opened(written, least(written))), expected)
    os.utime(written, ns=(1, 1))
    opened(written, least(written))
    assert len(list(folder.iterdir())) == 2, "a file that was written anew may be another model"


def test_layers_that_are_skipped_are_not_waited_for(folder: Path) -> None:
    skipped = frozenset((half, layer) for layer in (1, 2, 4) for half in ("attention", "mlp"))
    runner = opened("parlay-mini", least("parlay-mini"))
    assert torch.equal(logits(runner, skipped), logits(opened("parlay-mini"), skipped))


def test_more_room_pins_more_layers(folder: Path) -> None:
    room = least("parlay-mini")
    streamed = [
        layers_of(opened("parlay-mini", room + more)) for more in (0, 2_000_000, 4_000_000, 6_000_000, 8_000_000)
    ]
    assert streamed == [6, 5, 4, 3, 0]


def test_a_file_system_without_direct_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: str | Path, flags: int, *rest: int) -> int:
        if sys.platform == "linux" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real(path, flags, *rest)

    expected = logits(opened("parlay-mini"))
    monkeypatch.setattr("parlay.models.compiled.streaming.os.open", refusing)
    assert torch.equal(logits(opened("parlay-mini", least("parlay-mini"))), expected)


def test_a_path_that_vanishes_is_not_needed_any_more(folder: Path) -> None:
    runner = opened("parlay-mini", least("parlay-mini"))
    expected = logits(runner)
    shutil.rmtree(folder)
    assert torch.equal(logits(runner), expected)


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads.settle(2)
    yield
    threads.settle(1)


@pytest.mark.parametrize("said", ["was cut short", "is damaged"])
def test_a_file_that_changes_under_the_model(said: str, folder: Path) -> None:
    """The request says so, never with another text; who loads the model next packs it anew."""
    room = least("parlay-mini")
    runner = opened("parlay-mini", room)
    expected = logits(runner)
    if said == "was cut short":
        os.truncate(file_in(folder), file_in(folder).stat().st_size // 2)
    else:
        flip(file_in(folder), file_in(folder).stat().st_size - 4096)
    assert runner.loss() == ""
    for _ in range(2):
        with pytest.raises(RunnerLost, match=said):
            logits(runner)
    assert said in runner.loss(), "a server then loads the model again"
    assert torch.equal(logits(opened("parlay-mini", room)), expected)


def test_all_threads_leave_a_forward_that_ends_early(two_threads: None, folder: Path) -> None:
    """Wherever in the forward that is, and again: one that went on alone would wait for ever."""
    runner = opened("parlay-mini", least("parlay-mini") + 2_000_000, LoadOptions(device="cpu", threads=2))
    size = file_in(folder).stat().st_size
    check_early_ends(runner, file_in(folder), range(4096, size, size // 7))


def check_early_ends(runner: NativeRunner, path: Path, ends: Sequence[int]) -> None:
    """Cut the file at each of these, so that forwards end early, and put it right again."""
    expected, content = logits(runner), path.read_bytes()
    with path.open("r+b") as file:  # whose name goes with the first fault
        for end in ends:
            file.truncate(end // 4096 * 4096)
            for _ in range(3):
                with pytest.raises(LayersLost):
                    logits(runner)
            file.seek(0)
            file.write(content)
            file.flush()
            assert torch.equal(logits(runner), expected)


def test_damage_is_found_when_pinned_layers_are_read(folder: Path) -> None:
    room = least("parlay-mini") + 3_000_000
    runner = opened("parlay-mini", room)
    expected, streamed = logits(runner), layers_of(runner)
    assert streamed < 6
    content = bytearray(file_in(folder).read_bytes())
    for place in range(4096, len(content), 1 << 16):
        content[place] ^= 1
    file_in(folder).write_bytes(content)
    assert torch.equal(logits(opened("parlay-mini", room)), expected)


@pytest.mark.parametrize("at", [0, 40, 100])
def test_a_damaged_header_is_written_anew(at: int, folder: Path) -> None:
    room = least("parlay-mini")
    expected = logits(opened("parlay-mini", room))
    flip(file_in(folder), at)
    assert torch.equal(logits(opened("parlay-mini", room)), expected)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_disk_that_fails(folder: Path) -> None:
    """A descriptor that can't be read where the file was open stands for it."""
    runner = opened("parlay-mini", least("parlay-mini"))
    file = stream_of(runner)._file
    inside, outside = os.pipe()
    os.dup2(inside, file.file)
    os.close(inside)
    with pytest.raises(LayersLost, match="can't be read"):
        logits(runner)
    os.close(outside)


def test_a_disk_that_stalls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for no time at all finds that every disk does. When it answers, the model goes on."""
    room = least("parlay-mini")
    opened("parlay-mini", room)
    monkeypatch.setattr(streaming, "PATIENCE", 1e-9)
    runner = opened("parlay-mini", room)
    with pytest.raises(LayersLost, match=r"gave nothing of .* see whether it still answers"):
        _many_times(runner)


def _many_times(runner: NativeRunner) -> None:
    for _ in range(20):
        logits(runner)


def test_a_full_disk_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = least("parlay-mini")
    usage = shutil.disk_usage(folder.parent.parent.parent)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(ParlayError, match=r"take 11.25 MiB in .*, and there is less room: free some, or name"):
            opened("parlay-mini", room)

    def full(file: int, content: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(ParlayError, match=r"take 11.25 MiB in .*, and No space left on device"):
            opened("parlay-mini", room)
    assert list(folder.iterdir()) == []


def test_who_can_not_stream_says_so(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match="layers are streamed for CPUs and CUDA devices, not meta"):
        opened("parlay-mini", 10, LoadOptions(device="meta"))
    with pytest.raises(UsageError, match="for one model alone"):
        LLM("parlay-mini", memory="weights=9MB", ensemble="parlay-mini")
    with pytest.raises(ValueError, match="tensor_parallel=2"):
        LLM("parlay-mini", memory="weights=9MB", tensor_parallel_size=2)
    monkeypatch.setenv(SWITCH, "0")
    with pytest.raises(UnsupportedModel, match="only the compiled decoder reads layers from disk, and PARLAY_COMP"):
        opened("parlay-mini", 10)


def test_weights_beyond_the_free_memory_are_streamed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the target: models that draft stay whole."""
    monkeypatch.setattr("parlay.models.opening.free_bytes", lambda device: 20_000_000)
    assert opened("parlay-mini", None, LoadOptions(device="cpu", dtype="bfloat16")).spec.streamed_bytes > 0


def test_a_second_copy_in_few_bits_is_refused(folder: Path) -> None:
    with (
        LLM("parlay-mini", device="cpu", memory=f"weights={least('parlay-mini')}", router_memory="off") as llm,
        pytest.raises(UsageError, match=r"bits=4: the model's layers don't fit into memory"),
    ):
        llm.generate(PROMPT, SamplingParams(max_tokens=4), strategy="self-draft:bits=4")


class _Clock:
    """Every look at it takes as long as a slow forward."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 10.0
        return self.now


def test_the_price_of_rows_is_measured_where_forwards_take_long(folder: Path) -> None:
    """A guess would say that 16 rows cost half as much again, and drafts would be too short."""
    guessed = calibrate(opened("parlay-mini"), clock=_Clock())
    timed = calibrate(opened("parlay-mini", least("parlay-mini")), clock=_Clock())
    assert guessed.forward(16, 0) > 1.4 * guessed.forward(1, 0)
    assert timed.forward(16, 0) == timed.forward(8, 0) == timed.forward(1, 0)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("parlay-mini", device="cpu", router_memory="off") as llm:
        yield llm


@pytest.mark.parametrize("strategy", ["layer-skip", "draft-model", "auto"])
def test_texts_are_the_same_and_a_file_cut_short_is_one_error(strategy: str, plain: LLM, folder: Path) -> None:
    asks = [SamplingParams(temperature=0, max_tokens=24), SamplingParams(temperature=0.8, seed=3, max_tokens=24)]
    expected = _texts(plain, asks, "none")
    with LLM("parlay-mini", device="cpu", memory=f"weights={least('parlay-mini')}", router_memory="off") as llm:
        assert llm.runner.spec.streamed_bytes > 10_000_000
        assert _texts(llm, asks, strategy) == expected
        os.truncate(file_in(folder), 8192)
        with pytest.raises(RunnerLost, match="was cut short since the model was loaded: load it again"):
            _texts(llm, asks, strategy)
        assert not llm.engine.requests, "the engine is ready for more"


def _texts(llm: LLM, asks: Sequence[SamplingParams], strategy: str) -> list[str]:
    return [output.outputs[0].text for output in llm.generate([PROMPT] * len(asks), asks, strategy=strategy)]
