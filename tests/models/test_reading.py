"""How fast weights are read from memory is measured on the pool's threads, for models that caches do not hold."""

from __future__ import annotations

import pytest

from parlay import LLM
from parlay.compiled import structs
from parlay.compiled.library import NotLoaded, load
from parlay.models.compiled.memory import WeightArena
from parlay.models.compiled.reading import MemoryReader, WeightReader
from parlay.models.native import NativeRunner

MIB = 1 << 20
NO_HEAD = range(0)


@pytest.fixture
def core() -> structs.Core:
    try:
        return load()
    except NotLoaded as error:
        pytest.skip(str(error))


def arena_of(*sizes: int) -> WeightArena:
    arena = WeightArena()
    for size in sizes:
        arena.take(size)
    return arena


def test_reading_takes_as_long_as_some_memory_of_this_world_needs(core: structs.Core) -> None:
    """Between 0.01 and 10,000 GB/s: zero pages, which nobody has written, lie in the caches. A busy machine may stop
    threads for any time, so the shortest of some measurements counts."""
    reader = WeightReader(core, arena_of(40 * MIB, 40 * MIB, 30 * MIB), NO_HEAD)
    gigabytes = 110 * MIB / 1e9
    assert gigabytes / 10_000 < min(reader.seconds() for _ in range(20)) < gigabytes / 0.01


def test_memory_is_read_without_a_model_too(core: structs.Core) -> None:
    """Between 0.1 GB/s and what no cache that several processors share has."""
    assert core
    assert 1e8 < MemoryReader().bandwidth() < 1e12


def test_weights_that_caches_may_hold_are_not_measured(core: structs.Core) -> None:
    assert WeightReader(core, arena_of(60 * MIB), NO_HEAD).seconds() == 0
    assert WeightReader(core, arena_of(), NO_HEAD).seconds() == 0
    with LLM("parlay-mini", router_memory="off") as llm:
        assert isinstance(llm.runner, NativeRunner)
        assert llm.runner.time_reading() == 0


def test_only_weights_are_read_and_never_the_lm_heads() -> None:
    read: list[range] = []

    class Spy:
        def read_through(self, at: int, count: int, threads: int) -> float:
            read.append(range(at, at + count))
            return 1.0

    arena = arena_of(50 * MIB, 70 * MIB)
    first, second = arena.parts
    assert (len(first), len(second)) == (50 * MIB, 70 * MIB)
    head = range(second.start + 10 * MIB, second.start + 20 * MIB)
    reader = WeightReader(Spy(), arena, head)  # type: ignore[arg-type]
    for _ in range(20):
        reader.seconds()
    assert len(set(read)) == 5
    for each in read:
        assert any(part.start <= each.start and each.stop <= part.stop for part in (first, second))
        assert each.stop <= head.start or each.start >= head.stop
