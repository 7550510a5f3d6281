"""Prompt lookup against a search by brute force, through growth, truncation, forks and replacement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.drafters.copying.prompt_lookup import CANDIDATES, PromptLookup
from parlay.drafters.copying.prompt_lookup import PromptLookupOptions as Options
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.trees import is_chain
from parlay.types import NO_DRAFT
from tests.drafters.sight import EDITS, GREEDY, Sight, drafted, edit, no_runner

RESOURCES = Resources(vocab_size=50, open_runner=no_runner)


def brute_force(
    documents: Sequence[Sequence[int]], longest: int, shortest: int, leftmost: bool, budget: int
) -> tuple[list[int], int]:
    """The continuation of the longest earlier match, by looking at every place of every document."""
    own = list(documents[-1])
    best: tuple[int, list[int]] = (0, [])
    for document in documents:
        for place in range(1, len(document)):
            length = 0
            while length < min(place, longest, len(own)) and document[place - 1 - length] == own[-1 - length]:
                length += 1
            better = length > best[0] if leftmost else length >= best[0]
            if length >= shortest and better:
                best = (length, list(document[place : place + budget]))
    return best[1], best[0]


letters = st.lists(st.integers(0, 2), max_size=24)


@given(
    references=st.lists(letters, max_size=2),
    tokens=letters.filter(bool),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)).map(sorted),
    leftmost=st.booleans(),
    budget=st.integers(1, 6),
)
def test_it_finds_what_a_search_of_every_place_finds(
    references: list[list[int]], tokens: list[int], sizes: list[int], leftmost: bool, budget: int
) -> None:
    shortest, longest = sizes
    pick = "leftmost" if leftmost else "recent"
    drafter = PromptLookup(RESOURCES, Options(max_ngram=longest, min_ngram=shortest, pick=pick))
    request = replace(GREEDY, references=tuple(map(tuple, references)))
    draft = drafted(drafter, tokens, budget, request)
    expected, _ = brute_force([*references, tokens], longest, shortest, leftmost, budget)
    assert list(draft.tree.tokens) == expected
    assert is_chain(draft.tree)
    assert len(draft.scores) == len(draft.sources) == len(draft)


edits = st.lists(st.tuples(EDITS, letters), max_size=12)


@given(edits=edits)
def test_whatever_happened_before_it_proposes_what_a_fresh_one_would(edits: list[tuple[str, list[int]]]) -> None:
    drafter = PromptLookup(RESOURCES, Options())
    live = [0]
    for what, letters in edits:
        live = edit(live, what, letters)
        assert drafted(drafter, live, 5) == drafted(PromptLookup(RESOURCES, Options()), live, 5)


def test_text_that_repeats_is_continued_by_the_whole_budget_after_one_period() -> None:
    period = list(range(10))
    draft = drafted(PromptLookup(RESOURCES, Options()), [*period, *period], 10)
    assert list(draft.tree.tokens) == period


def test_a_long_match_is_surer_than_a_short_one_and_each_copied_token_adds_to_it() -> None:
    drafter = PromptLookup(RESOURCES, Options())
    short = drafted(drafter, [1, 2, 3, 9, 1], 2)
    long = drafted(drafter, [4, 5, 6, 7, 8, 4, 5, 6, 7], 2)
    assert short.tree.tokens == (2, 3)
    assert short.scores[0] < short.scores[1] < long.scores[0] < 1


def test_it_never_copies_past_the_end_of_a_reference_nor_across_two() -> None:
    request = replace(GREEDY, references=((1, 2, 3), (4, 5)))
    assert drafted(PromptLookup(RESOURCES, Options()), [9, 2], 5, request).tree.tokens == (3,)
    assert drafted(PromptLookup(RESOURCES, Options()), [9, 3], 5, request) == NO_DRAFT


def test_an_old_long_match_is_found_behind_many_short_ones() -> None:
    old = [1, 2, 3, 4, 5, 6]
    chatter = [4, 7] * (2 * CANDIDATES)
    draft = drafted(PromptLookup(RESOURCES, Options()), [*old, *chatter, 1, 2, 3, 4], 2)
    assert draft.tree.tokens == (5, 6)


def test_sequences_are_told_apart_and_forgotten() -> None:
    drafter = PromptLookup(RESOURCES, Options())
    views = [Sight(0, [1, 2, 1]), Sight(1, [1, 3, 1]), Sight(2, [1, 1, 1])]
    drafts = drafter.propose(views, [4, 1, 0])
    assert [draft.tree.tokens for draft in drafts] == [(2, 1), (3,), ()]
    for sequence in (0, 0, 5):
        drafter.release(sequence)
    assert drafter.propose([Sight(0, [7])], [4]) == [NO_DRAFT]


def test_contradicting_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="min_ngram 3 is more than max_ngram 2"):
        PromptLookup(RESOURCES, Options(max_ngram=2, min_ngram=3))


def test_a_copy_goes_on_where_it_ends_at_how_far_a_reference_was_read() -> None:
    """Long references are read in the course of several steps, and none while a match goes on."""
    reference = tuple((7 * place) % 4999 for place in range(4000))
    view = Sight(0, list(reference[:6]), replace(GREEDY, references=(reference,)))
    drafter = PromptLookup(replace(RESOURCES, vocab_size=5000), Options())
    while len(view.tokens) < 1500:
        (draft,) = drafter.propose([view], [4])
        assert draft.tree.tokens[:1] == (reference[len(view.tokens)],)
        view.tokens.append(reference[len(view.tokens)])
