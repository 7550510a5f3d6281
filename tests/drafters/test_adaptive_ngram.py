"""ANPD's n-gram module: exact counts of the committed text, back-off, recursion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.drafters.counting.adaptive_ngram import AdaptiveNgram
from parlay.drafters.counting.adaptive_ngram import AdaptiveNgramOptions as Options
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.strategies.spelling import parse
from parlay.trees import is_chain
from parlay.types import NO_DRAFT, Draft
from tests.drafters.sight import Sight, no_runner

RESOURCES = Resources(vocab_size=50, open_runner=no_runner)


def propose(drafter: AdaptiveNgram, tokens: Sequence[int], budget: int) -> Draft:
    return drafter.propose([Sight(0, tokens)], [budget])[0]


def followers(text: Sequence[int], query: Sequence[int], longest: int) -> Counter[int]:
    """What followed the longest suffix of ``query`` that anything followed in ``text``, by brute force."""
    for size in range(min(longest, len(query)), 0, -1):
        found = Counter(text[at] for at in range(size, len(text)) if text[at - size : at] == query[-size:])
        if found:
            return found
    return Counter()


edits = st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(0, 2), max_size=15)), max_size=6)


@given(edits=edits, ngram=st.integers(2, 6), budget=st.integers(1, 8))
def test_each_token_is_the_likeliest_by_counts_of_the_committed_text(
    edits: list[tuple[int, list[int]]], ngram: int, budget: int
) -> None:
    """After any rollback: drafted and taken back tokens are never learned from."""
    drafter = AdaptiveNgram(RESOURCES, Options(ngram=ngram))
    live = [0]
    for cut, new in edits:
        live[1 + cut :] = new
        draft = propose(drafter, live, budget)
        query = list(live)
        for token in draft.tree.tokens:
            counts = followers(live, query, ngram - 1)
            assert counts[token] == max(counts.values())
            query.append(token)
        assert len(draft) == budget or not followers(live, query, ngram - 1)
        assert is_chain(draft.tree)
        assert len(draft.scores) == len(draft.sources) == len(draft)
        assert all(0 < score < 1 for score in draft.scores)


@given(edits=edits)
def test_whatever_happened_before_it_proposes_what_a_fresh_one_would(edits: list[tuple[int, list[int]]]) -> None:
    drafter = AdaptiveNgram(RESOURCES, Options())
    live = [0]
    for cut, new in edits:
        live[1 + cut :] = new
        assert propose(drafter, live, 5) == propose(AdaptiveNgram(RESOURCES, Options()), live, 5)


def test_the_longest_known_ngram_decides_and_an_unknown_one_backs_off() -> None:
    text = [1, 2, 3, 9, 2, 4, 9, 2, 4, 8]
    assert propose(AdaptiveNgram(RESOURCES, Options(ngram=3)), [*text, 1, 2], 1).tree.tokens == (3,)
    assert propose(AdaptiveNgram(RESOURCES, Options(ngram=2)), [*text, 1, 2], 1).tree.tokens == (4,)
    assert propose(AdaptiveNgram(RESOURCES, Options(ngram=3)), [*text, 7, 2], 1).tree.tokens == (4,)


def test_a_drafted_token_is_part_of_the_next_query() -> None:
    text = [5, 1, 2, 6, 7, 2, 3, 8, 7, 2, 3]
    assert propose(AdaptiveNgram(RESOURCES, Options(ngram=3)), [*text, 5], 4).tree.tokens == (1, 2, 6, 7)


def test_what_follows_most_often_beats_what_followed_last() -> None:
    assert propose(AdaptiveNgram(RESOURCES, Options()), [1, 2, 8, 1, 2, 9, 1, 3, 7, 1], 1).tree.tokens == (2,)


def test_of_equally_frequent_followers_the_latest_is_taken() -> None:
    assert propose(AdaptiveNgram(RESOURCES, Options()), [1, 2, 8, 1, 3, 7, 1], 1).tree.tokens == (3,)


def test_nothing_is_drafted_after_an_unknown_token_nor_without_budget() -> None:
    assert propose(AdaptiveNgram(RESOURCES, Options()), [1, 2, 3], 4) == NO_DRAFT
    assert propose(AdaptiveNgram(RESOURCES, Options()), [1], 4) == NO_DRAFT
    assert propose(AdaptiveNgram(RESOURCES, Options()), [1, 1], 0) == NO_DRAFT
    assert len(propose(AdaptiveNgram(RESOURCES, Options()), [1, 1], 100_000)) == 100_000


def test_sequences_are_told_apart_and_forgotten() -> None:
    drafter = AdaptiveNgram(RESOURCES, Options())
    views = [Sight(0, [1, 2, 1]), Sight(1, [1, 3, 1])]
    assert [draft.tree.tokens for draft in drafter.propose(views, [1, 1])] == [(2,), (3,)]
    for sequence in (0, 0, 5):
        drafter.release(sequence)
    assert drafter.propose([Sight(0, [7])], [4]) == [NO_DRAFT]


@pytest.mark.parametrize("spec", ["adaptive-ngram:ngram=1", "adaptive-ngram:ngram=17", "adaptive-ngram:ngram=x"])
def test_levels_out_of_range_are_refused(spec: str) -> None:
    with pytest.raises(UsageError, match="ngram"):
        parse(spec)
