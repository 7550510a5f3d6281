"""Layers that the host's memory has and a device computes: by streams that are no device's, and by virtual clocks."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parlay import models
from parlay.models.compiled.streaming import WeightRoom
from parlay.models.config import DecoderConfig
from parlay.models.native import NativeRunner
from parlay.models.torch_ops.eager import EagerForward
from parlay.models.torch_ops.experts import ExpertShelf
from parlay.models.torch_ops.streaming import HostLayer, Lane, LayerCopies
from parlay.models.weights.fused import Operand
from parlay.options import LoadOptions
from parlay.testing.checkpoints import save_random
from parlay.types import ParlayError, Segment, Tree
from parlay.types.layer_split import LayerSplit

TEXT = tuple(range(5, 35))
TREE = Tree((7, 8, 9, 10, 11), (-1, 0, 0, 2, -1))
FLOAT64 = LoadOptions(device="cpu", dtype="float64")
"""Products of float64 are plain ones, so bits can be compared."""


# --------------------------------------------------------------------------------------------------------- schedules


@dataclass
class Clocks(Lane[float]):
    """Two streams that are told what to do ahead of time, as a device is; marks are times."""

    chance: random.Random
    copying: tuple[float, float]
    computing: tuple[float, float]
    compute_end: float = 0.0
    copy_end: float = 0.0
    may_compute: float = 0.0
    copies: list[tuple[int, float, float]] = field(default_factory=list)
    """Of each copy the buffer, when it begins and when it ends."""

    def host_memory(self, size: int) -> Tensor:
        raise AssertionError("the layers are there")

    def copy(self, to_B: Tensor, from_B: Tensor, after: float) -> float:
        begin = max(self.copy_end, after)
        self.copy_end = begin + self.chance.uniform(*self.copying)
        self.copies.append((to_B.data_ptr(), begin, self.copy_end))
        return self.copy_end

    def wait(self, copied: float) -> None:
        self.may_compute = max(self.may_compute, copied)

    def computed(self) -> float:
        return self.compute_end

    def compute(self) -> tuple[float, float]:
        """When the next piece of work runs."""
        begin = max(self.compute_end, self.may_compute)
        self.compute_end = begin + self.chance.uniform(*self.computing)
        return begin, self.compute_end


def copies_of(streamed: tuple[int, ...], layers: int, lane: Clocks) -> tuple[LayerCopies[float], list[Tensor]]:
    pinned = tuple(layer for layer in range(layers) if layer not in streamed)
    buffers = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
    images = {layer: torch.zeros(8, dtype=torch.uint8) for layer in streamed}
    return LayerCopies(LayerSplit(streamed, pinned, 0, 0, 8), images, buffers, lane), buffers


@pytest.mark.parametrize("seed", range(12))
def test_no_buffer_is_overwritten_before_its_layer_is_computed_nor_read_before_it_is_copied(seed: int) -> None:
    """The host runs ahead of both streams; forwards fail between layers, too."""
    chance = random.Random(seed)
    layers = chance.randint(3, 9)
    streamed = tuple(sorted(chance.sample(range(layers), chance.randint(3, layers))))
    lane = Clocks(chance, (0.1, chance.choice([0.5, 5.0])), (0.1, chance.choice([0.5, 5.0])))
    copies, buffers = copies_of(streamed, layers, lane)
    reads: list[tuple[int, float, float]] = []
    for _ in range(8):
        order, fails = [], chance.randint(0, layers) if chance.random() < 0.3 else None
        for index, layer in copies.in_order([_Layer(number) for number in range(layers)]):
            assert index == layer.number
            order.append(index)
            span = lane.compute()
            if index in streamed:
                place = buffers[streamed.index(index) % 2].data_ptr()
                copied = [end for at, _, end in lane.copies if at == place and end <= span[0]]
                assert copied, "a layer is computed before it is copied"
                reads.append((place, *span))
            if index == fails:
                break
        assert order == list(range(len(order)))
    for place, begin, end in reads:
        overlapping = [copy for copy in lane.copies if copy[0] == place and copy[1] < end and begin < copy[2]]
        assert not overlapping, "a copy overwrites what is being read"


@pytest.mark.parametrize(("copying", "computing"), [(3.0, 1.0), (1.0, 3.0)])
def test_a_forward_takes_as_long_as_the_slower_of_both_streams(copying: float, computing: float) -> None:
    lane = Clocks(random.Random(0), (copying, copying), (computing, computing))
    copies, _ = copies_of((0, 1, 2, 3), 4, lane)
    ends = []
    for _ in range(6):
        for _ in copies.in_order([_Layer(number) for number in range(4)]):
            lane.compute()
        ends.append(lane.compute_end)
    periods = [after - before for before, after in itertools.pairwise(ends[1:])]
    assert periods == pytest.approx([4 * max(copying, computing)] * 4)


@dataclass
class _Layer:
    number: int

    def with_weights(self, move: Callable[[Tensor], Tensor]) -> _Layer:
        return self


# ------------------------------------------------------------------------------------------------------------ logits


@dataclass
class Host(Lane[int]):
    """Copies in the host's memory: as early as may be, or not before somebody waits. ``failing``: the next wait."""

    late: bool = False
    failing: bool = False
    waiting: list[Callable[[], object]] = field(default_factory=list)
    begun: int = 0
    bytes: int = 0

    def host_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def copy(self, to_B: Tensor, from_B: Tensor, after: int) -> int:
        self.waiting.append(lambda: to_B.copy_(from_B))
        self.begun += 1
        self.bytes += len(from_B)
        if not self.late:
            self.wait(self.begun)
        return self.begun

    def wait(self, copied: int) -> None:
        if self.failing:
            self.failing = False
            raise RuntimeError("the device is lost")
        while self.begun - len(self.waiting) < copied:
            self.waiting.pop(0)()

    def computed(self) -> int:
        return 0


def opened(folder: Path, room: int | None = None, lane: Host | None = None) -> NativeRunner:
    """The folder's model by torch's operators, in so much memory of the "device"."""

    def make(
        config: DecoderConfig, weights: Mapping[str, Operand], dtype: torch.dtype, device: torch.device, **_: Any
    ) -> tuple[EagerForward, str]:
        wanted = None if room is None else WeightRoom(room, True, "tiny", lambda: "")
        streaming = None if wanted is None else (wanted, lane or Host())
        made = EagerForward(config, weights, dtype, device, streaming=streaming)
        return made, made.kernels.reason

    runner = models.load(str(folder), FLOAT64, cache_tokens=512, make_forward=make)
    assert isinstance(runner, NativeRunner)
    return runner


def least(folder: Path) -> int:
    with pytest.raises(ParlayError, match=r"allow \d+ bytes or more") as refused:
        opened(folder, 1)
    return int(re.findall(r"allow (\d+) bytes", str(refused.value))[0])


def logits(runner: NativeRunner) -> Tensor:
    """Logits of a text, of a tree behind it, of rows without some sub-layers, and of a row; and states between."""
    runner.open(0, TEXT[:1])
    try:
        assert runner.reserve(0, len(TEXT) + 2 + len(TREE))
        found = [runner.forward([Segment(0, TEXT)]).logits_RV]
        runner.keep(0, ())
        skip = frozenset(runner.spec.sublayers[2:5]) if runner.spec.layer_skip else frozenset()
        found.append(runner.forward([Segment(0, (5,), TREE)], skip=skip).logits_RV)
        out = runner.forward([Segment(0, (5,), TREE)], taps=(1,))
        found += [out.logits_RV, out.taps[1]]
        return torch.cat([part.flatten() for part in found])
    finally:
        runner.release(0)


@pytest.mark.parametrize("family", ["llama", "gemma4-e"])
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_logits_are_those_of_a_model_on_the_device(family: str, late: bool, tmp_path: Path) -> None:
    save_random(family, tmp_path)
    expected, room, lane = logits(opened(tmp_path)), least(tmp_path), Host(late)
    runner = opened(tmp_path, room, lane)
    assert runner.spec.streamed_bytes > 0
    assert torch.equal(logits(runner), expected)
    before = lane.bytes
    assert torch.equal(logits(runner), expected)
    assert lane.bytes - before == 3 * runner.spec.streamed_bytes, "each forward copies each layer once"


@pytest.mark.parametrize("family", ["gemma4-moe", "mixtral", "qwen2-moe", "gpt-oss"])
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_experts_come_when_rows_choose_them(family: str, late: bool, tmp_path: Path) -> None:
    """With two slots, with some, and with one for each expert, after which nothing is copied any more."""
    save_random(family, tmp_path)
    expected, room = logits(opened(tmp_path)), least(tmp_path)
    copied, each = [], expert_bytes(opened(tmp_path, room))
    for more in (0, 4, 1 << 20):
        lane = Host(late)
        runner = opened(tmp_path, room + more * each, lane)
        assert torch.equal(logits(runner), expected)
        before = lane.bytes
        assert torch.equal(logits(runner), expected)
        copied.append(lane.bytes - before)
    assert copied[0] > copied[1] > copied[2] == 0
    assert runner.spec.streamed_bytes == 0


def test_a_row_reads_the_experts_that_it_chose(tmp_path: Path) -> None:
    save_random("gemma4-moe", tmp_path)  # 2 of 6 experts in each layer
    lane = Host()
    runner = opened(tmp_path, least(tmp_path), lane)
    runner.open(0, TEXT[:1])
    assert runner.reserve(0, 1)
    runner.forward([Segment(0, TEXT[:1])])
    assert lane.bytes == 2 * runner.spec.num_layers * expert_bytes(runner)


def expert_bytes(runner: NativeRunner) -> int:
    shelf = runner._forward._decoder.layers[-1].mixture.shelf  # type: ignore[attr-defined]
    (size,) = {len(host.memory_B) for host in shelf._experts.values()}
    assert isinstance(size, int)
    return size


@pytest.mark.parametrize("seed", range(12))
def test_no_expert_is_overwritten_before_it_is_computed_nor_read_before_it_is_copied(seed: int) -> None:
    chance = random.Random(seed)
    count, numbers = chance.randint(2, 8), 6
    lane = Clocks(chance, (0.1, chance.choice([0.5, 5.0])), (0.1, chance.choice([0.5, 5.0])))
    slots = [torch.zeros(8, dtype=torch.uint8) for _ in range(count)]
    experts = {
        (layer, number): HostLayer(_Layer(number), torch.tensor([layer, number] * 4, dtype=torch.uint8))
        for layer in range(3)
        for number in range(numbers)
    }
    shelf: Any = ExpertShelf(experts, slots, lane)  # type: ignore[arg-type]
    reads: list[tuple[int, float, float]] = []
    for layer in [*range(3)] * 6:
        chosen = sorted(chance.sample(range(numbers), chance.randint(1, numbers)))
        found = []
        for expert in shelf.in_order(layer, chosen):
            found.append(expert.number)
            span = lane.compute()
            place = slots[shelf._resident[layer, expert.number][0]].data_ptr()
            copied = [end for at, _, end in lane.copies if at == place and end <= span[0]]
            assert copied, "an expert is computed before it is copied"
            reads.append((place, *span))
        assert found == chosen
    for place, begin, end in reads:
        overlapping = [copy for copy in lane.copies if copy[0] == place and copy[1] < end and begin < copy[2]]
        assert not overlapping, "a copy overwrites what is being read"


def test_the_budget_holds_what_is_on_the_device(tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    room = least(tmp_path)
    whole = int(re.findall(r"they take ([\d.]+) KiB", str(_refusal(tmp_path)))[0].split(".")[0]) * 1024
    streamed = []
    for size in range(room, whole + 4096, max(1, (whole - room) // 4)):
        runner = opened(tmp_path, size)
        decoder = runner._forward._decoder  # type: ignore[attr-defined]
        memory = {each.qkv._weight.untyped_storage() for each in decoder.layers}
        held = {storage.data_ptr(): storage.nbytes() for storage in memory}
        assert decoder.resident_bytes + sum(held.values()) <= size
        streamed.append(runner.spec.streamed_bytes)
    assert streamed == sorted(streamed, reverse=True)
    assert streamed[0] > streamed[-1]


def _refusal(folder: Path) -> ParlayError:
    with pytest.raises(ParlayError) as refused:
        opened(folder, 1)
    return refused.value


def test_a_forward_that_failed_leaves_nothing_behind(tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    expected, lane = logits(opened(tmp_path)), Host(late=True)
    runner = opened(tmp_path, least(tmp_path), lane)
    for _ in range(2):
        lane.failing = True
        with pytest.raises(RuntimeError, match="the device is lost"):
            logits(runner)
        assert torch.equal(logits(runner), expected)
