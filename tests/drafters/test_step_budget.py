"""No step's work grows with what a request brings: long prompts and documents are indexed in the course of many."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from parlay.drafters.copying import ngram_index
from parlay.drafters.copying.aggressive import Aggressive, AggressiveOptions
from parlay.drafters.copying.alignment import CATCH_UP, LOST, Trail
from parlay.drafters.copying.prompt_lookup import PromptLookup, PromptLookupOptions
from parlay.drafters.copying.reference_copy import ReferenceCopy, ReferenceCopyOptions
from parlay.drafters.counting.adaptive_ngram import AdaptiveNgram, AdaptiveNgramOptions
from parlay.drafters.counting.ngram_caches import NgramCaches, NgramCachesOptions, PastTexts
from parlay.drafters.resources import Resources
from parlay.drafters.state_room import StateRoom
from parlay.drafters.step_budget import STEP_TOKENS, StepBudget
from parlay.drafters.stores.suffix_automaton import SuffixAutomaton, SuffixAutomatonOptions
from parlay.drafters.stores.suffix_decoding import SuffixDecoding, SuffixDecodingOptions
from parlay.drafters.stores.suffixes import Suffixes
from parlay.drafters.stores.trie_lookahead import TrieLookahead, TrieLookaheadOptions
from parlay.types import Drafter
from tests.drafters.sight import GREEDY, Sight, no_runner, propose

RESOURCES = Resources(vocab_size=5000, open_runner=no_runner)
draw = random.Random(1)
DOCUMENTS = tuple(tuple(draw.randrange(5000) for _ in range(5 * STEP_TOKENS)) for _ in range(2))
END = list(DOCUMENTS[1][-40:-20])
"""A place near the end of the documents."""
ASKED = replace(GREEDY, references=DOCUMENTS)


@pytest.fixture
def appended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every token that an automaton takes in."""
    seen: list[int] = []
    append = Suffixes.append

    def counted(self: Suffixes, token: int) -> None:
        seen.append(token)
        append(self, token)

    monkeypatch.setattr(Suffixes, "append", counted)
    return seen


@pytest.mark.parametrize(
    "make",
    [
        lambda: SuffixDecoding(RESOURCES, SuffixDecodingOptions()),
        lambda: SuffixAutomaton(RESOURCES, SuffixAutomatonOptions()),
        lambda: TrieLookahead(RESOURCES, TrieLookaheadOptions()),
    ],
)
def test_automata_take_in_so_many_tokens_a_step_and_draft_once_they_have_all(
    make: Callable[[], Drafter], appended: list[int]
) -> None:
    drafter, views = make(), [Sight(name, [1, *END], ASKED) for name in (1, 2)]
    steps = 0
    while not all(map(len, drafter.propose(views, [4, 4]))):
        assert 0 < len(appended) <= STEP_TOKENS
        appended.clear()
        steps += 1
        assert steps < 30
    assert propose(drafter, views[0], 4).tree.tokens[0] == DOCUMENTS[1][-20]


def test_prompt_lookup_indexes_references_once_for_all_samples_and_a_part_a_step() -> None:
    drafter = PromptLookup(RESOURCES, PromptLookupOptions())
    views = [Sight(name, [1, *END], ASKED) for name in range(4)]
    known, steps = 0, 0
    while any(draft.tree.tokens[:1] != DOCUMENTS[1][-20:-19] for draft in drafter.propose(views, [4] * 4)):
        references = drafter._texts[0].references
        assert all(text.references is references for text in drafter._texts.values())
        assert references.places[0].known - known <= STEP_TOKENS // 2
        known, steps = references.places[0].known, steps + 1
        assert steps < 30
    assert steps > 10


def test_the_index_of_a_long_text_is_made_beside_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Worker:
        def __init__(self, *_: object, **__: object) -> None: ...

        def submit(self, work: Callable[[], object]) -> Any:
            made.append(work)
            return self

        def done(self) -> bool:
            return False

    monkeypatch.setattr(ngram_index, "ThreadPoolExecutor", Worker)
    drafter = ReferenceCopy(RESOURCES, ReferenceCopyOptions())
    views = [Sight(name, [1, *END], ASKED) for name in (1, 2)]
    assert not any(map(len, drafter.propose(views, [4, 4])))
    assert not any(map(len, drafter.propose(views, [4, 4])))
    assert len(made) == 1
    assert list(made[0]().copy(0, 3)) == list(DOCUMENTS[0][:3])


def test_an_output_that_was_long_before_it_is_followed_is_followed_from_near_its_end() -> None:
    places: list[int] = []

    def step(known: int, tokens: Any, at: int) -> int:
        places.append(at)
        return at

    trail = Trail(0, LOST, step, 10)
    assert trail.follow([0] * 5000) == 4999
    assert places == [*range(5000 - CATCH_UP, 5000)]
    assert trail.follow([0] * 100) == LOST


def test_what_a_sequence_leaves_is_there_for_those_after_it() -> None:
    step = StepBudget(StateRoom(), 100)
    step.begin([1] * 4)
    assert [step.take(wanted) for wanted in (10, STEP_TOKENS, 10, STEP_TOKENS)] == [
        10,
        STEP_TOKENS - STEP_TOKENS // 2 - 10,
        10,
        STEP_TOKENS // 2 - 10,
    ]
    step.begin([1] * 2)
    assert step.take_whole(10 * STEP_TOKENS)
    assert not step.take_whole(1)


DRAFTERS: dict[str, Callable[[Resources], Drafter]] = {
    "prompt-lookup": lambda resources: PromptLookup(resources, PromptLookupOptions()),
    "suffix-decoding": lambda resources: SuffixDecoding(resources, SuffixDecodingOptions()),
    "reference-copy": lambda resources: ReferenceCopy(resources, ReferenceCopyOptions()),
    "aggressive": lambda resources: Aggressive(resources, AggressiveOptions()),
    "adaptive-ngram": lambda resources: AdaptiveNgram(resources, AdaptiveNgramOptions()),
    "lookup-decoding": lambda resources: NgramCaches(resources, NgramCachesOptions()),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_states_of_requests_under_way_have_one_bound_and_give_back_what_they_took(name: str) -> None:
    """A text that finds no room costs drafts; when others end, it is taken in."""
    text = [draw.randrange(5000) for _ in range(2 * STEP_TOKENS)]
    views = [Sight(place, [*text, place, *text[:20]], replace(GREEDY, references=(tuple(text),))) for place in range(8)]
    plenty = StateRoom()
    alone = DRAFTERS[name](replace(RESOURCES, room=plenty))
    for _ in range(10):
        alone.propose(views[:1], [4])
    room = StateRoom(most=3 * plenty.nbytes)
    drafter = DRAFTERS[name](replace(RESOURCES, room=room))
    for _ in range(20):
        drafter.propose(views, [4] * len(views))
        assert 0 < room.nbytes < 1.1 * room.most
    for view in views[:-1]:
        drafter.release(view.sequence)
    for _ in range(20):
        drafter.propose(views[-1:], [4])
    assert propose(drafter, views[-1], 4).tree.tokens[0] == text[20]
    drafter.release(views[-1].sequence)
    assert room.nbytes == 0


def test_long_prompts_are_counted_in_the_course_of_several_steps() -> None:
    drafter = AdaptiveNgram(RESOURCES, AdaptiveNgramOptions())
    size = 3 * STEP_TOKENS
    view = Sight(1, [*range(size), size - 9, size - 8], GREEDY)
    steps = 0
    while not len(propose(drafter, view, 4)):
        steps += 1
        assert steps < 10
    assert steps


def test_past_texts_are_counted_a_part_at_a_time() -> None:
    past = PastTexts(10**6, 5000)
    past.learn("", [*range(1, 5000)] * 2)
    known = past.of("")
    assert known is not None
    window = known.window([4990, 4991])
    assert known.favourite(window, 2) is None
    for _ in range(5):
        past.advance()
    found = known.favourite(window, 2)
    assert found is not None
    assert (found.token, found.times) == (4992, 2)
