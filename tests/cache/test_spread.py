"""Ranks that share texts: all decide alike, and each has the rows of its own spans, whatever happens to the texts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from parlay.cache import BLOCK, Spread, Store
from parlay.types import OutOfRoom, Segment, Tree, trees
from tests.cache.test_store import SHAPE, code, random_tree


def resident(store: Store) -> int:
    """Bytes of the pages that are taken and here."""
    return sum(SHAPE.page_bytes for page in store.pool._taken if page.address)


class Ranks:
    """The stores of ranks that share texts in spans of 32 tokens; what is done to one is done to all."""

    def __init__(self, tokens: int, ranks: int) -> None:
        self.stores = [Store(replace(SHAPE, spread=Spread(rank, ranks, 32)), tokens) for rank in range(ranks)]

    def all(self, do: Callable[[Store], int | None]) -> int | None:
        """Do it to all; they answer alike."""
        (answer,) = {do(store) for store in self.stores}
        return answer

    def run(self, name: int, pending: tuple[int, ...], tree: Tree, path: list[int]) -> None:
        """If there is room: rows for the pending tokens and nodes, where their pages are; then the path is kept."""
        if self.all(lambda store: store.reserve(name, store.length(name) + len(pending) + len(tree))):
            self.all(lambda store: self._fill(store, name, pending, tree))
            self.all(lambda store: store.keep(name, path))

    @staticmethod
    def _fill(store: Store, name: int, pending: tuple[int, ...], tree: Tree) -> None:
        rows = store.stage(Segment(name, pending, tree))
        text = [*store._live[name].tokens, *pending]
        paths = [[tree.tokens[step] for step in trees.path_to(tree, node)] for node in range(len(tree))]
        numbers = torch.cat([code(text)[rows.start :], *(code([*text, *path])[-1:] for path in paths)])
        for slot, number in enumerate(numbers, rows.start):
            if rows.table[slot // BLOCK].address:
                rows.table.row(slot)[0][:] = number

    def check(self) -> None:
        for store in self.stores:
            store.check()
            for entry in store._live.values():
                for slot, number in enumerate(code(entry.tokens) if entry.tokens else ()):
                    here = slot // 32 % len(self.stores) == store.shape.spread.rank
                    assert bool(entry.table[slot // BLOCK].address) == here
                    assert not here or bool((entry.table.row(slot)[0] == number).all())


@pytest.mark.parametrize("count", [2, 3])
def test_each_rank_has_the_rows_of_its_spans(count: int) -> None:
    """Prefixes are found, texts forked and cut, and accepted nodes moved over the ends of spans."""
    ranks, draw, live = Ranks(640, count), random.Random(count), list[int]()
    for step in range(70):
        name = draw.choice(live) if live else -1
        if not live or (len(live) < 6 and draw.random() < 0.2):
            live.append(step)
            text = draw.choices(range(2), k=draw.randrange(1, 90))
            if name >= 0 and draw.random() < 0.5:
                ranks.all(lambda store, name=name, step=step: store.fork(name, step))
            else:
                ranks.all(lambda store, text=text, step=step: store.open(step, text))
        elif draw.random() < 0.1:
            ranks.all(lambda store, name=name: store.release(name))
            live.remove(name)
        elif draw.random() < 0.2:
            length = draw.randrange(100)
            ranks.all(lambda store, name=name, length=length: store.truncate(name, length))
        elif ranks.stores[0].length(name) < 200:
            tree, pending = (
                random_tree(draw, draw.randrange(12)),
                tuple(draw.choices(range(2), k=draw.randrange(1, 40))),
            )
            ranks.run(name, pending, tree, trees.path_to(tree, draw.randrange(len(tree))) if len(tree) else [])
        ranks.check()


def test_ranks_hold_together_what_their_memories_hold() -> None:
    for store in Ranks(640, 2).stores:
        assert store.capacity() == store.free_tokens() == 640
        store.open(1, [])
        assert store.reserve(1, 640)
        assert resident(store) == store.nbytes == store._budget.total == 20 * SHAPE.page_bytes
        with pytest.raises(OutOfRoom):
            store.reserve(1, 641)
        store.release(1)
        assert store.free_tokens() == 640


def test_a_text_may_grow_where_another_rank_is_full() -> None:
    """Rank 0 has two spans of three; what is full counts by rank, not by the sum."""
    for store in Ranks(128, 2).stores:
        store.open(1, [])
        assert store.reserve(1, 96)
        assert store.reserve(1, 128)
        store.open(2, [])
        assert not store.reserve(2, 1)
