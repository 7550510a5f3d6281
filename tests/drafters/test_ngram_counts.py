"""N-gram counts equal those of a recount, whatever was added and taken back."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from parlay.drafters.counting.counted_texts import CountedText
from parlay.ngrams.in_context import NgramCounts

LONGEST = 3
VOCAB = 3

texts = st.lists(st.integers(0, VOCAB - 1), max_size=20)


def recount(text: Sequence[int], gram: Sequence[int]) -> Counter[int]:
    """What followed ``gram`` in the text, by looking at every place."""
    size = len(gram)
    return Counter(text[at] for at in range(size, len(text)) if list(text[at - size : at]) == list(gram))


def grams() -> list[list[int]]:
    """Every n-gram there can be."""
    found: list[list[int]] = [[]]
    for gram in found:
        if len(gram) < LONGEST:
            found += [[*gram, token] for token in range(VOCAB)]
    return found[1:]


def check(counts: NgramCounts, expected: dict[tuple[int, ...], Counter[int]]) -> None:
    for gram, followers in expected.items():
        window, size = counts.window(gram), len(gram)
        found = counts.favourite(window, size)
        assert (found is None) == (not followers)
        assert all(counts.count(window, size, token) == followers[token] for token in range(VOCAB))
        if found is not None:
            assert (found.times, found.total) == (max(followers.values()), followers.total())
            assert followers[found.token] == found.times


@given(edits=st.lists(st.tuples(st.integers(0, 25), texts), max_size=8))
def test_counts_equal_a_recount_after_growth_and_rollback(edits: list[tuple[int, list[int]]]) -> None:
    """ANPD and lookup decoding must never keep what was counted of tokens that were taken back."""
    text = CountedText(LONGEST, VOCAB)
    live: list[int] = []
    for cut, new in edits:
        live[cut:] = new
        text.follow(live)
        check(text.counts, {tuple(gram): recount(live, gram) for gram in grams()})


@given(edits=st.lists(st.tuples(st.integers(0, 25), texts), max_size=8))
def test_after_a_rollback_favourites_are_those_of_a_fresh_count(edits: list[tuple[int, list[int]]]) -> None:
    """Also among equal counts, of which the latest wins."""
    text, fresh = CountedText(LONGEST, VOCAB), CountedText(LONGEST, VOCAB)
    live: list[int] = []
    for cut, new in edits:
        live[cut:] = new
        text.follow(live)
    fresh.follow(live)
    for gram in grams():
        window = text.counts.window(gram)
        assert text.counts.favourite(window, len(gram)) == fresh.counts.favourite(window, len(gram))


@given(several=st.lists(texts, max_size=5), gone=st.integers(0, 5))
def test_texts_taken_out_in_any_order_leave_the_counts_of_the_others(several: list[list[int]], gone: int) -> None:
    counts = NgramCounts(LONGEST, VOCAB)
    for text in several:
        counts.add(text, 0, array("i"))
    for text in several[:gone]:
        counts.remove(text, 0, None)
    left = several[gone:]
    for gram in grams():
        window, size = counts.window(gram), len(gram)
        followers = sum((recount(text, gram) for text in left), Counter[int]())
        found = counts.favourite(window, size)
        assert (found.total if found else 0) == followers.total()
        assert all(counts.count(window, size, token) == followers[token] for token in range(VOCAB))
    assert counts.empty == all(len(text) < 2 for text in left)


def test_a_favourite_is_the_surer_the_longer_its_ngram_and_the_more_often_it_was_seen() -> None:
    text = CountedText(LONGEST, 10)
    text.follow([1, 2, 3, 4, 9, 1, 2, 3, 4, 8, 1, 2, 3, 5])
    window = text.counts.window([1, 2, 3])
    chances = []
    for size in (1, 2, 3):
        found = text.counts.favourite(window, size)
        assert found == (4, 2, 3)
        chances.append(found.chance(size))
    assert 0 < chances[0] < chances[1] < chances[2] < 1
    assert found._replace(total=2).chance(3) > chances[2]
