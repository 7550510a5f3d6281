"""Pages come from slabs, are never handed out twice, and a slab that nobody needs is the system's again."""

from __future__ import annotations

import gc
import random
import sys

import pytest
import torch

from parlay.bench.host import resident_bytes
from parlay.cache import CacheShape, Store
from parlay.cache.pages import Page, Pool

CPU = torch.device("cpu")
LARGE = CacheShape(num_layers=4, num_kv_heads=4, head_dim=64, dtype=torch.float32, device=CPU)
SMALL = CacheShape(num_layers=1, num_kv_heads=1, head_dim=2, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_pages_are_apart_and_of_the_shape_and_their_heads_are_where_the_pitch_says(shape: CacheShape) -> None:
    pool = Pool(shape)
    pages = [pool.take() for _ in range(150)]
    assert shape.page_bytes == pages[0].rows.numel() * pages[0].rows.element_size()
    for number, page in enumerate(pages):
        page.rows.fill_(number)
    for number, page in enumerate((*pages, pages[0].copy())):
        assert page.rows.shape == shape.size
        assert (page.rows == number % len(pages)).all()
        heads = [head for kind in page.rows.flatten(0, 1) for head in kind]
        assert all(head.is_contiguous() for head in heads)
        assert [head.data_ptr() for head in heads] == [page.address + at * page.pitch for at in range(len(heads))]


def test_pages_that_are_taken_together_follow_each_other() -> None:
    pool = Pool(SMALL)
    pages = [pool.take() for _ in range(8)]
    rows = pages[0].rows[0, 0, 0]
    size = rows.numel() * rows.element_size()
    assert [page.address - pages[0].address for page in pages] == [at * size for at in range(8)]


def test_a_page_is_never_with_two_whatever_is_taken_and_given() -> None:
    chance, pool = random.Random(0), Pool(SMALL)
    taken: list[Page] = []
    for _ in range(2000):
        if taken and chance.random() < 0.5:
            pool.give(taken.pop(chance.randrange(len(taken))))
        else:
            taken.append(pool.take())
        pool.check(taken)
    assert len({page.address for page in taken}) == len(taken) == sum(pool.taken)


def test_the_check_finds_what_is_lost_and_what_is_given_twice() -> None:
    pool = Pool(SMALL)
    one, two = pool.take(), pool.take()
    with pytest.raises(AssertionError, match="lost"):
        pool.check([one])
    pool.give(one)
    with pytest.raises(AssertionError, match="given back"):
        pool.check([one])
    with pytest.raises(KeyError):
        pool.give(one)
    pool.check([two])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the C library is trusted with it")
def test_memory_of_slabs_without_a_page_in_use_is_not_resident_any_more() -> None:
    store = Store(LARGE, 16 * 384)
    gc.collect()  # else what other tests left is given back meanwhile
    before = resident_bytes()
    for name in range(2):
        store.open(name, [name])
        assert store.reserve(name, 16 * 192)  # three slabs
        for page in store._live[name].table:
            page.rows.fill_(1)
    assert resident_bytes() - before > 0.9 * store.nbytes
    store.release(0)
    assert store.nbytes == 192 * LARGE.page_bytes
    assert resident_bytes() - before < 1.1 * store.nbytes
