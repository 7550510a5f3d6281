"""The store against a slow oracle: whatever is opened, kept, cut, forked and released, rows are those of the tokens."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from parlay import trees
from parlay.cache import Rows, Shape, Store
from parlay.types import OutOfRoom, Tree

SHAPE = Shape(num_layers=2, num_kv_heads=1, head_dim=2, dtype=torch.int64, device=torch.device("cpu"), stride=24)


def code(tokens: list[int]) -> torch.Tensor:
    """The row that token i must have, ``[len(tokens)]``: a number that depends on all tokens up to it."""
    digest, rows = 0, []
    for token in tokens:
        digest = (digest * 31 + token + 1) % 1_000_003
        rows.append(digest)
    return torch.tensor(rows, dtype=torch.int64)


def write(rows: Rows, committed: list[int], pending: tuple[int, ...], tree: Tree) -> None:
    """What a forward does: a row for every pending token and node, and rubbish in the gap."""
    rows.buffer[:, :, :, rows.start : rows.nodes_at] = -1
    text = [*committed, *pending]
    rows.buffer[:, :, :, rows.start : len(text)] = code(text)[rows.start :, None]
    for node in range(len(tree)):
        path = [tree.tokens[step] for step in trees.path_to(tree, node)]
        rows.buffer[:, :, :, rows.nodes_at + node] = code([*text, *path])[-1]


def random_tree(draw: random.Random, size: int) -> Tree:
    return Tree(tuple(draw.choices(range(3), k=size)), tuple(draw.randrange(-1, node) for node in range(size)))


class StoreMachine(RuleBasedStateMachine):
    """Few tokens and a small budget, so that prefixes collide and room runs out."""

    @initialize(tokens=st.sampled_from([64, 160, 400]))
    def start(self, tokens: int) -> None:
        self.store = Store(SHAPE, tokens)
        self.texts: dict[int, list[int]] = {}
        self.draw = random.Random(tokens)
        self.names = 0

    def _new(self, tokens: list[int]) -> int:
        self.names += 1
        self.texts[self.names] = tokens
        return self.names

    @rule(seed=st.integers(0, 3), length=st.integers(1, 90), salt=st.sampled_from(["", "other"]))
    def open(self, seed: int, length: int, salt: str) -> None:
        wanted = random.Random(seed).choices(range(3), k=length)
        match = self.store.match_prefix(wanted, salt)
        name = self._new([])
        cached = self.store.open(name, wanted, salt)
        assert cached <= match < len(wanted)
        self.texts[name] = wanted[:cached]

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), pending=st.integers(1, 40), size=st.integers(0, 6), gap=st.integers(0, 5))
    def step(self, data: st.DataObject, pending: int, size: int, gap: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.texts)))
        text = self.texts[name]
        wanted = random.Random(data.draw(st.integers(0, 3))).choices(range(3), k=len(text) + pending)[len(text) :]
        total = len(text) + pending + size
        if total > self.store.capacity():
            with pytest.raises(OutOfRoom):
                self.store.reserve(name, total)
            return
        if not self.store.reserve(name, total):
            return
        tree = random_tree(self.draw, size)
        rows = self.store.stage(name, tuple(wanted), tree.tokens, gap)
        write(rows, text, tuple(wanted), tree)
        path = self.draw.choice([(), *trees.leaf_paths(tree)])
        if data.draw(st.booleans()):
            text += [*wanted, *(tree.tokens[node] for node in path)]
            assert self.store.keep(name, path) == len(text)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), length=st.integers(0, 60))
    def truncate(self, data: st.DataObject, length: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.texts)))
        del self.texts[name][length:]
        assert self.store.truncate(name, length) == len(self.texts[name])

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.texts)))
        copy = self._new([])
        self.store.fork(name, copy)
        self.texts[copy] = self.texts[name][: self.store.length(copy)]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.texts)))
        del self.texts[name]
        self.store.release(name)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def reserving_all_room_succeeds(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.texts)))
        room = self.store.room()
        assert self.store.reserve(name, len(self.texts[name]) // SHAPE.stride * SHAPE.stride + room)
        self.store.release(name)
        del self.texts[name]

    @invariant()
    def rows_are_those_of_the_tokens(self) -> None:
        self.store.check()
        for name, text in self.texts.items():
            assert self.store.length(name) == len(text)
            if text and self.store.reserve(name, len(text)):
                rows = self.store.stage(name, (), ())
                assert bool((rows.buffer[..., : len(text), :] == code(text)[:, None]).all())


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def filled(store: Store, name: int, tokens: list[int], salt: str = "") -> None:
    cached = store.open(name, tokens, salt)
    assert store.reserve(name, len(tokens))
    write(store.stage(name, tuple(tokens[cached:]), ()), tokens[:cached], tuple(tokens[cached:]), Tree())
    store.keep(name, ())


def test_a_prefix_is_found_to_the_token_but_never_whole() -> None:
    store = Store(SHAPE, 1000)
    filled(store, 0, list(range(40)))
    assert store.match_prefix([*range(37), 99]) == 37
    assert store.match_prefix(list(range(40))) == 39
    assert store.match_prefix([99, *range(40)]) == 0


def test_nothing_is_shared_between_salts() -> None:
    store = Store(SHAPE, 1000)
    filled(store, 0, list(range(40)), salt="a")
    store.release(0)
    assert store.match_prefix(list(range(40)), "b") == 0
    assert store.open(1, list(range(40)), "a") == 39


def test_rows_that_were_not_kept_are_never_reused() -> None:
    store = Store(SHAPE, 1000)
    store.open(0, list(range(50)))
    store.reserve(0, 50)
    store.stage(0, tuple(range(50)), ())
    store.release(0)
    assert store.match_prefix(list(range(50))) == 0


def test_rejected_rows_are_never_reused_and_accepted_ones_are() -> None:
    store = Store(SHAPE, 1000)
    prompt, draft = list(range(60)), tuple(range(100, 140))
    store.open(0, prompt)
    store.reserve(0, 100)
    tree = trees.chain_tree(draft)
    write(store.stage(0, tuple(prompt), draft), [], tuple(prompt), tree)
    store.keep(0, range(25))
    for _ in range(2):
        assert store.match_prefix([*prompt, *draft]) == 85
        store.release(0)


def test_the_least_recently_used_prefix_is_given_up_first() -> None:
    store = Store(SHAPE, 4 * 48)
    for name in range(4):
        filled(store, name, [name] * 32)
        store.release(name)
    assert store.open(9, [0] * 32) == 31  # read: now the most recent
    store.release(9)
    filled(store, 5, [5] * 32)
    found = [store.match_prefix([name] * 32) > 0 for name in range(4)]
    assert found == [True, False, False, True]


def test_the_rows_of_a_text_in_use_are_never_given_up() -> None:
    store = Store(SHAPE, 3 * 48)
    filled(store, 0, [0] * 40)
    for name in range(1, 9):
        filled(store, name, [name] * 40)
        store.release(name)
    assert store.match_prefix([0] * 40) == 39


def test_a_prefix_stays_known_while_one_of_its_copies_is_there() -> None:
    store = Store(SHAPE, 4 * 48)
    filled(store, 0, [*[7] * 32, *range(16)])
    store.release(0)
    filled(store, 1, [*[7] * 32, *range(50, 66)])
    filled(store, 2, [1] * 48)
    filled(store, 3, [2] * 48)  # what 1 was copied from makes room
    store.check()
    assert store.match_prefix([*[7] * 32, 99]) == 32


def test_buffers_are_charged_in_whole_and_given_back() -> None:
    store = Store(SHAPE, 480)
    filled(store, 0, list(range(10)))
    assert (store.room(), store.held) == (480 - 24, 24 * SHAPE.slot_bytes)
    store.release(0)  # too short to be reused
    assert (store.room(), store.held) == (480, 0)
    filled(store, 1, list(range(40)))
    assert store.reserve(1, 400)
    store.release(1)
    assert store.held == store.spare == 48 * SHAPE.slot_bytes


def test_rows_that_grow_token_by_token_are_seldom_moved() -> None:
    store = Store(SHAPE, 24_000)
    store.open(0, [1])
    moves, slots = 0, 0
    for tokens in range(1, 20_000):
        assert store.reserve(0, tokens)
        moves += store.held != slots
        slots = store.held
    assert moves < 30


def test_room_is_refused_while_others_hold_it_and_for_ever_when_there_is_too_little() -> None:
    store = Store(SHAPE, 72)
    store.open(0, [1])
    store.open(1, [2])
    assert store.reserve(0, 48)
    assert not store.reserve(1, 25)
    store.release(0)
    assert store.reserve(1, 72)
    with pytest.raises(OutOfRoom, match=r"73 tokens does not fit a cache of 72, which is 4\.5 KiB: allow more memory"):
        store.reserve(1, 73)


def test_misuse_is_named() -> None:
    store = Store(SHAPE, 64)
    store.open(0, [1])
    with pytest.raises(ValueError, match="open already"):
        store.open(0, [1])
    with pytest.raises(ValueError, match="not open"):
        store.reserve(7, 1)
    with pytest.raises(ValueError, match="reserve them first"):
        store.stage(0, (1,), ())
    with pytest.raises(ValueError, match="too small"):
        Store(SHAPE, 0)
    store.release(7)
