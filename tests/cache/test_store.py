"""The store against a slow oracle: whatever is opened, kept, cut, forked and released, rows are those of the tokens."""

from __future__ import annotations

import itertools
import random
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from parlay.cache import BLOCK, Budget, CacheShape, RecentShape, Rows, Store
from parlay.types import NO_TREE, OutOfRoom, Segment, Skip, Tree, trees

SHAPE = CacheShape(num_layers=2, num_kv_heads=1, head_dim=2, dtype=torch.int64, device=torch.device("cpu"))
NONE, ONE = replace(SHAPE, num_layers=0), replace(SHAPE, num_layers=1)
RECENT = RecentShape(shape=SHAPE, layers=(0, 1), window=10, longest=320, margin=BLOCK, ahead=2 * BLOCK)
"""Layers that see ten keys."""
SOME = replace(RECENT, shape=ONE, layers=(1,), window=21)
"""A second layer that sees 21 keys, where the first sees all."""


def code(tokens: list[int]) -> torch.Tensor:
    """The row that token i must have, ``[len(tokens)]``: a number that depends on all tokens up to it."""
    digest, rows = 0, []
    for token in tokens:
        digest = (digest * 31 + token + 1) % 1_000_003
        rows.append(digest)
    return torch.tensor(rows, dtype=torch.int64)


def run(store: Store, name: int, pending: tuple[int, ...], tree: Tree = NO_TREE, base: int = 0) -> None:
    """What a forward does: rows for the pending tokens and nodes from ``base`` on. The others must be there."""
    rows = store.stage(Segment(name, pending, tree, base=base))
    text = [*store._live[name].tokens, *pending]
    paths = [[tree.tokens[step] for step in trees.path_to(tree, node)] for node in range(len(tree))]
    numbers = torch.cat([code(text)[rows.start :], *(code([*text, *path])[-1:] for path in paths)])
    for row, number in enumerate(numbers):
        for cell in cells(rows, rows.start + row):
            if row < rows.base:
                assert bool((cell == number).all())
            else:
                cell[:] = number


def cells(rows: Rows, slot: int) -> tuple[torch.Tensor, ...]:
    """What is cached of one token."""
    return rows.table.row(slot) + (() if rows.recent is None else rows.recent.row(slot))


def read(store: Store, name: int) -> torch.Tensor:
    """All numbers in the rows of a sequence, ``[tokens, n]``. Reads the store's own table: staging may copy a page."""
    entry = store._live[name]
    rows = [entry.table.row(slot)[0].flatten() for slot in range(len(entry.tokens))]
    return torch.stack(rows) if rows else torch.zeros(0, 1, dtype=torch.int64)


def read_recent(store: Store, name: int, window: int) -> torch.Tensor:
    """The numbers in the recent pages of the tokens that the next row sees, ``[tokens, n]``."""
    entry = store._live[name]
    rows = [entry.recent.row(s)[0].flatten() for s in range(max(0, len(entry.tokens) - window), len(entry.tokens))]
    return torch.stack(rows) if rows else torch.zeros(0, 1, dtype=torch.int64)


def random_tree(draw: random.Random, size: int) -> Tree:
    return Tree(tuple(draw.choices(range(3), k=size)), tuple(draw.randrange(-1, node) for node in range(size)))


class StoreMachine(RuleBasedStateMachine):
    """Few tokens and a small budget, so that prefixes collide and room runs out."""

    shape: CacheShape = SHAPE
    recent: RecentShape | None = None

    @initialize(tokens=st.sampled_from([64, 160, 400]))
    def start(self, tokens: int) -> None:
        self.store = Store(self.shape, tokens, recent=self.recent)
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
    @rule(data=st.data(), pending=st.integers(1, 40), size=st.integers(0, 6))
    def step(self, data: st.DataObject, pending: int, size: int) -> None:
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
        levels = (
            sorted(data.draw(st.sets(st.integers(1, pending + size - 1), max_size=2))) if pending + size > 1 else []
        )
        for base, end in itertools.pairwise([0, *levels, pending + size]):
            nodes = max(0, end - pending)
            run(self.store, name, tuple(wanted), Tree(tree.tokens[:nodes], tree.parents[:nodes]), base)
        path = self.draw.choice([(), *trees.leaf_paths(tree)])
        if data.draw(st.booleans()):
            text += [*wanted, *(tree.tokens[node] for node in path)]
            assert self.store.keep(name, path) == len(text)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), length=st.integers(0, 60))
    def truncate(self, data: st.DataObject, length: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.texts)))
        left = self.store.truncate(name, length)
        assert left == min(length, len(self.texts[name])) or (self.recent and left < length)
        del self.texts[name][left:]

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
    @rule(data=st.data(), back=st.integers(0, 40), ahead=st.integers(0, 20))
    def run_again(self, data: st.DataObject, back: int, ahead: int) -> None:
        """Rows of any value come and go, committed ones too; several sequences at once, as in one forward."""
        names = data.draw(st.lists(st.sampled_from(sorted(self.texts)), unique=True, max_size=3))
        with ExitStack() as lent:
            for name in names:
                again, end = min(back, len(self.texts[name])), len(self.texts[name]) + ahead
                if end <= self.store.capacity() and self.store.reserve(name, end):
                    segment = Segment(name, (1,) * ahead, base=-again)
                    try:
                        rows = self.store.stage(segment, frozenset({("mlp", 0)}))
                    except ValueError:
                        assert self.recent is not None, "all that they see is there"
                        continue
                    lent.enter_context(self.store.putting_back(segment))
                    for slot in range(rows.start, rows.start + rows.end):
                        for cell in cells(rows, slot):
                            cell[:] = -name

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def reserving_all_room_succeeds(self, data: st.DataObject) -> None:
        """But for the copy of a page that others use too."""
        name = data.draw(st.sampled_from(sorted(self.texts)))
        entry = self.store._live[name]
        copies = BLOCK if entry.tail is not None and entry.tail.users > 1 else 0
        room = self.store.free_tokens()
        enough = self.recent is not None or self.store.reserve(name, len(entry.table) * BLOCK + max(0, room - copies))
        assert room < copies or enough
        self.store.release(name)
        del self.texts[name]

    @invariant()
    def rows_are_those_of_the_tokens(self) -> None:
        self.store.check()
        for name, text in self.texts.items():
            assert self.store.length(name) == len(text)
            if self.shape.num_layers:
                assert bool((read(self.store, name) == code(text)[:, None]).all())
            if self.recent is not None:
                seen = code(text)[max(0, len(text) - self.recent.window) :, None]
                assert bool((read_recent(self.store, name, self.recent.window) == seen).all())


class SomeRecentMachine(StoreMachine):
    shape, recent = ONE, SOME


class AllRecentMachine(StoreMachine):
    shape, recent = NONE, RECENT


TestStore = StoreMachine.TestCase
TestSomeRecent = SomeRecentMachine.TestCase
TestAllRecent = AllRecentMachine.TestCase
TestStore.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestSomeRecent.settings = TestAllRecent.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(("shape", "recent", "pages"), [(ONE, SOME, 40 + 3), (NONE, RECENT, 2)])
def test_keys_that_no_layer_sees_any_more_take_no_memory(shape: CacheShape, recent: RecentShape, pages: int) -> None:
    """Of 640 tokens those that have windows keep the last ones; what lies behind is reusable until it is needed."""
    store, text = Store(shape, 2000, recent=recent), list(range(640))
    store.open(0, text)
    for first in range(0, 640, 32):
        assert store.reserve(0, first + 32)
        run(store, 0, tuple(text[first : first + 32]))
        assert store.keep(0, ()) == first + 32
        store.check()
    page = SHAPE.page_bytes // (2 if shape.num_layers else 1)
    assert store.nbytes - store.spare == pages * page
    assert store.match_prefix([*text[:100], -1]) == 100
    while store.drop_spare():
        store.check()
    assert store.match_prefix([*text[:100], -1]) == 0
    assert store.match_prefix([*text, -1]) == 640
    assert store.truncate(0, 630) == 630
    assert store.truncate(0, 100) == 0
    store.check()


def test_recent_keys_are_counted_once_for_each_text() -> None:
    """A budget of two texts of 320 tokens takes two, or many short ones whose pages are as many."""
    store = Store(ONE, 1, Budget(2 * (20 + SOME.most) * ONE.page_bytes), recent=SOME)
    assert store.capacity() == store.free_tokens() == 640
    for name in (0, 1):
        store.open(name, ())
        assert store.reserve(name, 320)
    store.open(2, ())
    assert not store.reserve(2, BLOCK)
    with pytest.raises(OutOfRoom):
        store.reserve(0, 1000)


def test_rows_whose_window_was_given_up_can_not_run_again() -> None:
    store, text = Store(ONE, 640, recent=SOME), list(range(200))
    filled(store, 0, text)
    assert store.reserve(0, 201)
    store.stage(Segment(0, (1,), base=-BLOCK))
    store.stage(Segment(0, (1,), base=-120))
    store.check()
    run(store, 0, (1,))
    store.keep(0, ())
    while store.drop_spare():
        store.check()
    with pytest.raises(ValueError, match="100 cached tokens can't run again"):
        store.stage(Segment(0, (1,), base=-100))


def filled(store: Store, name: int, tokens: list[int], salt: str = "") -> None:
    cached = store.open(name, tokens, salt)
    assert store.reserve(name, len(tokens))
    run(store, name, tuple(tokens[cached:]))
    store.keep(name, ())


def test_a_prefix_is_found_to_the_token_but_never_whole() -> None:
    store = Store(SHAPE, 1000)
    filled(store, 0, list(range(40)))
    assert store.match_prefix([*range(32), 99]) == 32
    assert store.match_prefix([*range(29), 99]) == 29
    assert store.match_prefix(list(range(32))) == 31
    assert store.match_prefix([99, *range(40)]) == 0
    store.release(0)
    assert store.match_prefix([*range(37), 99]) == 37
    assert store.match_prefix(list(range(40))) == 39


def test_a_prefix_is_reused_where_it_lies() -> None:
    store = Store(SHAPE, 1000)
    filled(store, 0, list(range(40)))
    held = store.nbytes
    assert store.open(1, [*range(32), 99]) == 32
    assert store.nbytes == held
    assert [page.address for page in store._live[1].table] == [page.address for page in store._live[0].table][:2]


@pytest.mark.parametrize("length", [64, 70])
def test_eight_samples_of_a_prompt_hold_its_pages_once(length: int) -> None:
    """Each takes one page more for what it writes itself."""
    store, prompt = Store(SHAPE, 4000), list(range(length))
    filled(store, 0, prompt)
    alone = store.nbytes
    for name in range(1, 8):
        store.fork(0, name)
    assert store.nbytes == alone
    for name in range(8):
        assert store.reserve(name, length + 1)
        run(store, name, (name,))
        store.keep(name, ())
        store.check()
    # a full last page stays as it is; one that is filled in part was copied by all but the last to write
    assert store.nbytes == alone + (8 if length % BLOCK == 0 else 7) * SHAPE.page_bytes
    for name in range(8):
        assert bool((read(store, name) == code([*prompt, name])[:, None]).all())


def test_what_is_written_after_a_fork_leaves_the_others_rows_bit_for_bit() -> None:
    store, prompt = Store(SHAPE, 1000), list(range(40))
    filled(store, 0, prompt)
    store.fork(0, 1)
    tree = Tree((7, 8, 9), (-1, 0, 0))
    for writer, reader in ((1, 0), (0, 1)):
        before = read(store, reader).clone()
        assert store.reserve(writer, 44)
        run(store, writer, (3,), tree)
        store.keep(writer, (0, 2))
        assert torch.equal(before, read(store, reader))
        assert bool((read(store, writer) == code([*prompt, 3, 7, 9])[:, None]).all())
        store.check()


def test_a_leader_that_was_forked_after_it_reserved_can_write_all_the_same() -> None:
    store = Store(SHAPE, 48)
    filled(store, 0, list(range(40)))
    assert store.reserve(0, 48)
    store.fork(0, 1)
    run(store, 0, (1,))
    assert store.keep(0, ()) == 41
    assert bool((read(store, 1) == code(list(range(40)))[:, None]).all())


def test_two_that_compute_the_same_text_end_up_with_one_copy() -> None:
    store, text = Store(SHAPE, 1000), list(range(64))
    for name in (0, 1):
        store.open(name, text)
    for name in (0, 1):
        assert store.reserve(name, 64)
        run(store, name, tuple(text))
        store.keep(name, ())
    assert store.nbytes == 4 * SHAPE.page_bytes
    store.check()


def test_a_text_computed_again_gets_the_pages_that_a_released_one_left() -> None:
    store, text = Store(SHAPE, 1000), list(range(64))
    for name in (0, 1):
        store.open(name, text)
        assert store.reserve(name, 64)
    for name in (0, 1):
        run(store, name, tuple(text))
        store.keep(name, ())
        if name == 0:
            store.release(0)
        store.check()
    assert (store.nbytes, store.spare) == (4 * SHAPE.page_bytes, 0)


def test_a_fork_between_a_forward_and_its_keep_shares_full_pages_only() -> None:
    store, text = Store(SHAPE, 1000), list(range(40))
    filled(store, 0, text)
    assert store.reserve(0, 48)
    run(store, 0, tuple(range(8)))
    store.fork(0, 1)
    store.check()
    assert store.length(1) == 32
    assert store.keep(0, ()) == 48
    assert bool((read(store, 1) == code(text[:32])[:, None]).all())


def test_what_is_cut_off_stays_where_other_texts_go_on_from_it() -> None:
    store = Store(SHAPE, 1000)
    filled(store, 0, list(range(48)))
    store.release(0)
    assert store.open(1, [*range(32), 99]) == 32
    store.truncate(1, 16)
    store.check()
    assert store.match_prefix([*range(48), 1]) == 48


def test_writing_into_a_found_page_does_not_spoil_what_others_would_find_there() -> None:
    store = Store(SHAPE, 1000)
    filled(store, 0, list(range(64)))
    store.release(0)
    for question in (100, 200, 300):
        text = [*range(20), *range(question, question + 30)]
        filled(store, question, text)
        store.release(question)
        store.check()
    for text in (list(range(64)), [*range(20), *range(100, 130)], [*range(20), *range(300, 330)]):
        assert store.match_prefix(text) == len(text) - 1


def test_where_memory_is_full_a_found_page_is_written_over() -> None:
    store = Store(SHAPE, 32)
    filled(store, 0, list(range(32)))
    store.release(0)
    filled(store, 1, [*range(20), *range(50, 62)])
    assert bool((read(store, 1) == code([*range(20), *range(50, 62)])[:, None]).all())
    assert store.match_prefix([*range(32), 1]) == 20
    store.check()


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
    store.stage(Segment(0, tuple(range(50))))
    store.release(0)
    assert store.match_prefix(list(range(50))) == 0


def test_rejected_rows_are_never_reused_and_accepted_ones_are() -> None:
    store = Store(SHAPE, 1000)
    prompt, draft = list(range(60)), tuple(range(100, 140))
    store.open(0, prompt)
    store.reserve(0, 100)
    tree = trees.chain_tree(draft)
    run(store, 0, tuple(prompt), tree)
    store.keep(0, range(25))
    assert store.match_prefix([*prompt, *draft]) == 80  # whole pages of a text in use
    store.release(0)
    assert store.match_prefix([*prompt, *draft]) == 85


def test_what_is_cut_off_is_forgotten() -> None:
    store = Store(SHAPE, 1000)
    filled(store, 0, list(range(64)))
    store.truncate(0, 37)
    assert (store.nbytes, store.spare) == (3 * SHAPE.page_bytes, 0)
    assert store.match_prefix(list(range(64))) == 32


def test_the_least_recently_used_prefix_is_given_up_first() -> None:
    store = Store(SHAPE, 4 * 32)
    for name in range(4):
        filled(store, name, [name] * 32)
        store.release(name)
    assert store.open(9, [0] * 33) == 32  # read: now the most recent
    store.release(9)
    filled(store, 5, [5] * 32)
    found = [store.match_prefix([name] * 32) > 0 for name in range(4)]
    assert found == [True, False, True, True]


def test_the_end_of_a_text_is_given_up_before_its_beginning() -> None:
    store = Store(SHAPE, 6 * 16)
    filled(store, 0, list(range(96)))
    store.release(0)
    filled(store, 1, [7] * 32)
    assert store.match_prefix(list(range(96))) == 64


def test_the_rows_of_a_text_in_use_are_never_given_up() -> None:
    store = Store(SHAPE, 3 * 48)
    filled(store, 0, [0] * 40)
    for name in range(1, 9):
        filled(store, name, [name] * 40)
        store.release(name)
    assert store.match_prefix([0] * 40) == 32
    assert bool((read(store, 0) == code([0] * 40)[:, None]).all())


def test_pages_are_charged_in_whole_and_given_back() -> None:
    store = Store(SHAPE, 480)
    filled(store, 0, list(range(10)))
    assert (store.free_tokens(), store.nbytes, store.spare) == (480 - 16, SHAPE.page_bytes, 0)
    store.release(0)
    assert (store.free_tokens(), store.nbytes, store.spare) == (480, SHAPE.page_bytes, SHAPE.page_bytes)
    filled(store, 1, list(range(50, 90)))
    assert store.reserve(1, 400)
    store.release(1)
    assert store.nbytes == store.spare == 4 * SHAPE.page_bytes


def test_rows_of_a_text_that_grows_are_never_moved() -> None:
    store = Store(SHAPE, 24_000)
    store.open(0, [1])
    before: list[int] = []
    for tokens in range(1, 4000, 7):
        assert store.reserve(0, tokens)
        addresses = [page.address for page in store._live[0].table]
        assert addresses[: len(before)] == before
        before = addresses


def test_room_is_refused_while_others_hold_it_and_for_ever_when_there_is_too_little() -> None:
    store = Store(SHAPE, 72)
    store.open(0, [1])
    store.open(1, [2])
    assert store.reserve(0, 48)
    assert not store.reserve(1, 33)
    store.release(0)
    assert store.reserve(1, 80)
    with pytest.raises(OutOfRoom, match=r"81 tokens does not fit a cache of 80, which is 5 KiB: allow more memory"):
        store.reserve(1, 81)


def test_room_for_the_copy_of_a_shared_page_is_reserved_with_the_rest() -> None:
    store = Store(SHAPE, 64)
    filled(store, 0, list(range(40)))
    store.fork(0, 1)
    assert store.reserve(1, 48)
    assert store.free_tokens() == 0
    assert not store.reserve(0, 41)
    store.stage(Segment(1, (1,)))  # copies the page, so the other is alone with it
    assert store.reserve(0, 48)
    store.check()


def test_misuse_is_named() -> None:
    store = Store(SHAPE, 64)
    store.open(0, [1])
    with pytest.raises(ValueError, match="open already"):
        store.open(0, [1])
    with pytest.raises(ValueError, match="not open"):
        store.reserve(7, 1)
    with pytest.raises(ValueError, match="reserve them first"):
        store.stage(Segment(0, (1,)))
    with pytest.raises(ValueError, match="too small"):
        Store(SHAPE, 0)
    store.release(7)


def test_a_copy_takes_no_page_that_later_levels_of_a_step_need() -> None:
    """A text that goes on within a page that others may find; all memory is reserved, then rows run level by level."""
    store, text = Store(SHAPE, 64), [1] * 20
    store.open(1, text)
    assert store.reserve(1, 20)
    run(store, 1, tuple(text))
    store.keep(1, ())
    store.release(1)
    assert store.open(2, [1] * 10 + [2] * 10) == 10
    assert store.reserve(2, 64)
    for nodes in (0, 44):
        store.stage(Segment(2, (2,) * 10, trees.chain_tree([2] * nodes), base=10 if nodes else 0))


@pytest.mark.parametrize(
    ("segment", "skip"),
    [
        (Segment(0, (1, 2), Tree((3, 9), (-1, -1)), base=4), frozenset()),
        (Segment(0, (1, 2), Tree((3, 4), (-1, 0)), base=4), frozenset()),
        (Segment(0, (1, 2), Tree((3, 4, 5), (-1, -1, 0)), base=5), frozenset()),
        (Segment(0, (1, 9), Tree((3, 4), (-1, -1)), base=3), frozenset()),
        (Segment(0, (1, 2), Tree((3, 4), (-1, -1)), base=3), frozenset({("mlp", 0)})),
        (Segment(0, (1, 2), base=-3), frozenset()),
    ],
    ids=["other token", "other parent", "more than ran", "other pending", "other sub-layers", "more than is cached"],
)
def test_a_base_that_is_not_there_is_refused(segment: Segment, skip: Skip) -> None:
    store = Store(SHAPE, 64)
    filled(store, 0, [7, 8])
    assert store.reserve(0, 20)
    run(store, 0, (1, 2), Tree((3, 4), (-1, -1)))
    with pytest.raises(ValueError, match="run"):
        store.stage(segment, skip)
    assert store.keep(0, (1,)) == 5, "what was staged before can be kept all the same"


def test_rows_that_ran_again_without_sub_layers_serve_nobody() -> None:
    """What follows them saw them, and they are put back."""
    store, skip = Store(SHAPE, 64), frozenset({("mlp", 0)})
    filled(store, 0, [7, 8])
    assert store.reserve(0, 20)
    store.stage(Segment(0, (1, 2), base=-1), skip)
    with pytest.raises(ValueError, match="run them again"):
        store.stage(Segment(0, (1, 2, 3), base=2), skip)
