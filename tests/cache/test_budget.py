"""One budget for several stores: who gives way to whom, and that no more is held than was allowed."""

from __future__ import annotations

import random

import pytest
import torch

from parlay.cache import Budget, CacheShape, MemoryBounds, Store, parse_bytes
from parlay.types import OutOfRoom, Segment

SHAPE = CacheShape(num_layers=2, num_kv_heads=1, head_dim=2, dtype=torch.float32, device=torch.device("cpu"))
SMALL = CacheShape(num_layers=1, num_kv_heads=1, head_dim=2, dtype=torch.float32, device=torch.device("cpu"))
PAGE = SHAPE.page_bytes


def pair(pages: int) -> tuple[Store, Store]:
    """A target's store and a drafter's with pages half as large, in memory for so many pages of the target."""
    budget = Budget(pages * PAGE)
    return Store(SHAPE, 1, budget), Store(SMALL, 1, budget)


def filled(store: Store, name: int, token: int, length: int = 16) -> None:
    cached = store.open(name, [token] * (length + 1))
    assert store.reserve(name, length)
    store.stage(Segment(name, (token,) * (length - cached)))
    store.keep(name, ())


def spare(store: Store, token: int) -> None:
    filled(store, 1000 + token, token)
    store.release(1000 + token)


def known(store: Store, token: int) -> bool:
    return store.match_prefix([token] * 17) > 0


def test_texts_that_nobody_uses_go_first_and_drafters_before_the_targets() -> None:
    target, drafter = pair(pages=4)
    for token in (1, 2):
        spare(target, token)
    for token in (3, 4):
        spare(drafter, token)
    filled(target, 0, 9, length=32)
    assert [known(target, 1), known(target, 2)] == [True, True]
    assert [known(drafter, 3), known(drafter, 4)] == [False, False]
    filled(target, 1, 8)
    assert [known(target, 1), known(target, 2)] == [False, True]


def test_a_drafter_in_use_may_push_out_unused_texts_of_the_target_but_none_in_use() -> None:
    target, drafter = pair(pages=3)
    filled(target, 0, 9, length=32)
    spare(target, 1)
    filled(drafter, 0, 2, length=32)
    assert not known(target, 1)
    drafter.open(1, [5])
    assert not drafter.reserve(1, 1)
    assert target.length(0) == 32


def test_the_target_gets_what_drafters_hold_and_they_find_out_by_truncate() -> None:
    target, drafter = pair(pages=2)
    filled(drafter, 0, 2, length=32)
    assert target.free_tokens() == target.capacity() == 32
    filled(target, 0, 9, length=32)
    assert drafter.truncate(0, 32) == 0
    assert not drafter.reserve(0, 1)
    target.release(0)
    filled(drafter, 7, 2, length=64)
    target.check()
    drafter.check()


def test_texts_that_nobody_uses_can_be_given_up_all_at_once() -> None:
    budget = Budget(8 * PAGE)
    target, drafter = Store(SHAPE, 1, budget), Store(SMALL, 1, budget)
    filled(target, 0, 9)
    spare(target, 1)
    spare(drafter, 2)
    budget.drop_spare()
    assert (target.spare, drafter.spare, drafter.nbytes) == (0, 0, 0)
    assert target.length(0) == 16


def test_no_more_is_held_than_was_allowed_whatever_happens() -> None:
    chance = random.Random(1)
    budget = Budget(20 * PAGE)
    stores = Store(SHAPE, 1, budget), Store(SMALL, 1, budget), Store(SMALL, 1, budget)
    opened: list[tuple[Store, int]] = []
    for name in range(600):
        store = chance.choice(stores)
        store.open(name, chance.choices(range(2), k=chance.randint(1, 60)))
        opened.append((store, name))
        store, other = chance.choice(opened)
        wanted = store.length(other) + chance.randint(1, 50)
        if wanted <= store.capacity() and store.reserve(other, wanted):
            store.stage(Segment(other, tuple(chance.choices(range(2), k=wanted - store.length(other)))))
            store.keep(other, ())
        if len(opened) > 5:
            store, other = opened.pop(chance.randrange(len(opened)))
            store.release(other)
        for store in stores:
            store.check()
        assert budget.free >= 0
        assert budget.total - budget.free == sum(store.nbytes for store in stores)


def test_of_several_targets_none_takes_a_running_text_of_another() -> None:
    """Unused texts of each may go, and so may what drafters hold."""
    budget = Budget(4 * PAGE, targets=2)
    one, two, drafter = (Store(SHAPE, 1, budget) for _ in range(3))
    filled(one, 0, 9)
    spare(one, 1)
    filled(drafter, 0, 2)
    filled(two, 0, 9, length=48)
    assert not known(one, 1)
    assert (one.length(0), two.length(0), drafter.truncate(0, 16)) == (16, 48, 0)
    one.open(1, [5])
    two.open(1, [5])
    assert not one.reserve(1, 1)
    assert not two.reserve(1, 1)


def test_stores_bring_their_shares_unless_the_total_is_fixed() -> None:
    shared, fixed = Budget(), Budget(3 * PAGE)
    for budget in (shared, fixed):
        Store(SHAPE, 32, budget)
        Store(SMALL, 64, budget)
    assert (shared.total, fixed.total) == (4 * PAGE, 3 * PAGE)


def test_a_drafter_that_could_never_fit_is_told_so_and_a_target_at_once() -> None:
    target, _ = pair(pages=1)
    huge = CacheShape(num_layers=90, num_kv_heads=1, head_dim=2, dtype=torch.float32, device=torch.device("cpu"))
    drafter = Store(huge, 1, target._budget)
    drafter.open(0, [1])
    with pytest.raises(OutOfRoom):
        drafter.reserve(0, 1)
    with pytest.raises(ValueError, match=r"memory of 100 bytes is too small .* than 512 bytes"):
        Store(SHAPE, 1, Budget(100))


@pytest.mark.parametrize(
    ("said", "count"), [(4096, 4096), ("4096", 4096), ("2GiB", 2 << 30), ("1.5 KiB", 1536), ("500MB", 500_000_000)]
)
def test_memory_is_written_as_people_write_it(said: int | str, count: int) -> None:
    assert parse_bytes(said) == count


@pytest.mark.parametrize("said", ["", "much", "2 gigs", "-1GiB", "0", 0, -5, f"{'9' * 400}GB", 1 << 60])
def test_what_is_no_size_is_refused(said: int | str) -> None:
    with pytest.raises(ValueError, match="memory"):
        parse_bytes(said)


@pytest.mark.parametrize(
    ("said", "bounds"),
    [
        (None, MemoryBounds()),
        (4096, MemoryBounds(4096)),
        ("2GiB", MemoryBounds(2 << 30)),
        ("weights=1.5 KiB", MemoryBounds(None, 1536)),
        ("1KiB, weights=2KiB", MemoryBounds(1024, 2048)),
        ("weights=2KiB,requests=1KiB", MemoryBounds(1024, 2048)),
    ],
)
def test_memory_may_bound_the_weights_too(said: int | str | None, bounds: MemoryBounds) -> None:
    assert MemoryBounds.parse(said) == bounds


@pytest.mark.parametrize("said", ["", "weights=", "wights=1GiB", "1GiB,2GiB", "weights=1,weights=2", "weights=-1", ","])
def test_what_bounds_nothing_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match="memory"):
        MemoryBounds.parse(said)


def test_replicas_share_the_memory_out() -> None:
    assert MemoryBounds.parse("2GiB").shared_out(2, 77) == str(1 << 30)
    assert MemoryBounds.parse("weights=8").shared_out(2, 77) == "38,weights=4"


def test_only_the_target_s_weights_are_bounded() -> None:
    budget = Budget(4096, weights=100)
    assert (budget.weights, budget.awaits_target) == (100, True)
    Store(SHAPE, 8, budget)
    assert (budget.weights, budget.awaits_target) == (None, False)
