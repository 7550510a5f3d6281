"""What drafters keep of requests under way is part of the memory that the user allows."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import torch

from parlay.cache import Budget, CacheShape, Store
from parlay.cache.pages import BLOCK
from parlay.drafters.copying.prompt_lookup import PromptLookup, PromptLookupOptions
from parlay.drafters.counting.ngram_caches import PastTexts
from parlay.drafters.fixed_point.lookahead import Lookahead
from parlay.drafters.heads.next_states import Eagle
from parlay.drafters.options import HeadOptions, LookaheadOptions
from parlay.drafters.resources import Resources
from parlay.drafters.state_room import StateRoom, most_tenants
from parlay.drafters.stores.output_store import OutputStores, StoreOptions
from parlay.testing.random_heads import random_heads
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import NO_DRAFT, Observation, Verdict
from tests.drafters.sight import GREEDY, Sight, no_runner, propose

VOCAB = 24
TARGET = ToyRunner(RandomLogits(VOCAB), VOCAB).spec
RESOURCES = Resources(5000, no_runner)
PAGES = 64
SHAPE = CacheShape(num_layers=1, num_kv_heads=1, head_dim=64, dtype=torch.float32, device=torch.device("cpu"))


def test_the_targets_cache_takes_what_states_hold_and_they_come_back_once_it_is_free() -> None:
    """The largest state goes first; the drafter builds it again from the tokens."""
    budget = Budget(PAGES * SHAPE.page_bytes)
    store = Store(SHAPE, 1, budget)
    drafter = PromptLookup(replace(RESOURCES, room=(room := StateRoom(budget))), PromptLookupOptions())
    draw = random.Random(1)
    texts = [[draw.randrange(5000) for _ in range(size)] for size in (1500, 150)]
    views = [Sight(place, [*text, *text[:20]], GREEDY) for place, text in enumerate(texts)]

    assert all(map(len, drafter.propose(views, [4, 4])))
    both = room.nbytes
    store.open(1, [1])
    assert store.reserve(1, store.capacity() - 100_000 // SHAPE.page_bytes * BLOCK)
    assert 0 < room.nbytes < both / 3
    assert store.reserve(1, store.capacity())
    assert room.nbytes == 0
    assert budget.free == 0

    store.release(1)
    for _ in range(3):
        drafts = drafter.propose(views, [4, 4])
    assert [draft.tree.tokens[0] for draft in drafts] == [text[20] for text in texts]
    assert room.nbytes > 0


def test_states_take_only_what_the_cache_leaves() -> None:
    budget = Budget(PAGES * SHAPE.page_bytes)
    store = Store(SHAPE, 1, budget)
    drafter = PromptLookup(replace(RESOURCES, room=(room := StateRoom(budget))), PromptLookupOptions())
    store.open(1, [1])
    assert store.reserve(1, store.capacity())
    text = [*range(2000)]
    view = Sight(0, [*text, *text[:20]], GREEDY)
    assert not len(propose(drafter, view, 4))
    assert room.nbytes == 0
    store.release(1)
    assert len(propose(drafter, view, 4))


def test_a_head_gives_up_features_that_find_no_room_and_drafts_from_the_last_ones() -> None:
    room, count = StateRoom(), 400
    drafter = Eagle(Resources(VOCAB, no_runner, find_head=random_heads(TARGET), room=room), HeadOptions())
    generator = torch.Generator().manual_seed(0)
    view = Sight(tokens=[place % VOCAB for place in range(count + 1)])
    features_TH = torch.randn(count, TARGET.hidden_size, generator=generator)
    room.most = features_TH[:100].nbytes
    for start in range(0, count, 40):
        taps = {TARGET.num_layers: features_TH[start : start + 40].clone()}
        drafter.observe([Observation(view, NO_DRAFT, Verdict((), ()), taps, start=start)])
        assert room.nbytes <= room.most
    assert len(propose(drafter, view, 4))
    drafter.release(view.sequence)
    assert room.nbytes == 0


def test_lookahead_begins_no_pool_without_room() -> None:
    room = StateRoom(most=100_000)
    drafter = Lookahead(replace(RESOURCES, room=room), LookaheadOptions())
    views = [Sight(place, [*range(200), 1, 2], GREEDY) for place in range(3)]
    assert [bool(len(draft)) for draft in drafter.propose(views, [4] * 3)] == [True, False, False]
    drafter.release(0)
    assert len(propose(drafter, views[2], 4))


def test_stores_hold_few_tenants_and_none_pushes_out_one_that_has_less() -> None:
    """Each tenant costs memory, however little it put out. Of texts, the tenant that has most loses its oldest."""
    stores, past = OutputStores(8, StoreOptions(max_tokens=1000), 50, "toy"), PastTexts(1000, 50)
    for number in range(3 * most_tenants(1000)):
        stores._waiting.append((str(number), array("i", [1, 2, 3])))
        stores.advance()
        past.learn(str(number), [1, 2, 3])
    assert len(stores._stores) == len(past._tenants) == most_tenants(1000)

    for _ in range(100):
        stores._waiting.append(("busy", array("i", [*range(20)])))
        stores.advance()
        past.learn("busy", [*range(20)])
    last = str(3 * most_tenants(1000) - 1)
    assert last in stores._stores
    assert past.of(last) is not None
    assert sum(store.tokens for store in stores._stores.values()) == stores._kept <= 1000
    assert sum(tenant.tokens for tenant in past._tenants.values()) == past._num_tokens <= 1000
