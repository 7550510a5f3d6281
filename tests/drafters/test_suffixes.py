"""Counted suffixes against a count of all substrings by brute force, while texts come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from parlay.drafters.state_room import StateRoom
from parlay.drafters.step_budget import STEP_TOKENS, StepBudget
from parlay.drafters.stores.live_texts import LiveText
from parlay.drafters.stores.suffixes import END, Suffixes
from tests.drafters.sight import EDITS, edit

letters = st.lists(st.integers(0, 2), max_size=14)
texts = st.lists(letters, min_size=1, max_size=5)
depths = st.sampled_from([1, 2, 3, 5, 20])

Substring = tuple[int, ...]


def substrings(texts: Sequence[Sequence[int]], longest: int) -> Counter[Substring]:
    found: Counter[Substring] = Counter()
    for text in texts:
        for start in range(len(text)):
            found.update(tuple(text[start:end]) for end in range(start + 1, min(len(text), start + longest) + 1))
    return found


def state_of(suffixes: Suffixes, wanted: Sequence[int]) -> int:
    state = 0
    for token in wanted:
        state = suffixes.follow(state, token) if state >= 0 else -1
    return state


def count(suffixes: Suffixes, wanted: Substring) -> int:
    state = state_of(suffixes, wanted)
    return suffixes.counts[state] if state >= 0 else 0


@given(texts=texts, gone=st.integers(0, 5), late=letters, depth=depths)
def test_every_substring_is_counted_while_texts_come_and_go(
    texts: list[list[int]], gone: int, late: list[int], depth: int
) -> None:
    suffixes = Suffixes(depth)
    for text in texts:
        suffixes.add(text)
    for text in texts[:gone]:
        suffixes.remove(text)
    suffixes.add(late)
    expected = substrings([*texts[gone:], late], depth)
    for wanted in substrings([*texts, late], depth):
        assert count(suffixes, wanted) == expected[wanted]
        children = {token: times for token, times, _ in suffixes.children(state_of(suffixes, wanted))}
        if len(wanted) < depth:
            assert children == {token: expected[*wanted, token] for token in range(3) if expected[*wanted, token]}


@given(texts=texts, gone=st.integers(0, 5), query=letters, depth=depths)
def test_the_longest_match_is_that_of_a_search_of_every_place(
    texts: list[list[int]], gone: int, query: list[int], depth: int
) -> None:
    suffixes = Suffixes(depth)
    for text in texts:
        suffixes.add(text)
    for text in texts[:gone]:
        suffixes.remove(text)
    known = substrings(texts[gone:], depth)
    state, length = suffixes.match(query)
    lengths = range(min(depth, len(query)), 0, -1)
    assert length == next((length for length in lengths if known[tuple(query[-length:])]), 0)
    assert state == state_of(suffixes, query[len(query) - length :])


@given(text=letters.filter(bool), depth=depths)
def test_every_end_of_a_text_below_the_depth_is_named_once_with_its_state(text: list[int], depth: int) -> None:
    suffixes = Suffixes(depth)
    suffixes.add(text)
    lengths: list[int] = []
    for state, shortest, longest in suffixes.ends(suffixes.window, suffixes.window_length):
        assert all(state_of(suffixes, text[-length:]) == state for length in range(shortest, longest + 1))
        lengths += range(longest, shortest - 1, -1)
    assert lengths == list(range(min(len(text), depth - 1), 0, -1))


@given(references=st.lists(letters, max_size=3), text=letters.filter(bool))
def test_the_first_copy_is_the_leftmost_of_the_longest_earlier_matches(
    references: list[list[int]], text: list[int]
) -> None:
    live = LiveText(20, tuple(map(tuple, references)))
    place, length = live.follow(text).first_copy()
    written = [token for part in [*references, text] for token in (END, *part)]
    assert list(live.text) == written
    best = (0, -1)
    for end in range(len(written) - 1):
        matching = 0
        while matching < len(text) and written[end - matching] == text[-1 - matching] != END:
            matching += 1
        best = max(best, (matching, -end - 1))
    assert (length, place) == ((best[0], -best[1]) if best[0] else (0, -1))


edits = st.lists(st.tuples(EDITS, letters), max_size=10)


@given(edits=edits)
def test_whatever_happened_before_a_live_text_holds_what_a_fresh_one_does(edits: list[tuple[str, list[int]]]) -> None:
    kept = LiveText(6, ((0, 1, 0),))
    live = [0]
    for what, letters in edits:
        live = edit(live, what, letters)
        known = substrings([[0, 1, 0], live], 6)
        suffixes = kept.follow(live)
        assert all(count(suffixes, wanted) == times for wanted, times in known.items())
        assert list(kept.text) == [END, 0, 1, 0, END, *live]


def test_of_very_many_children_the_most_frequent_are_shown_with_live_counts() -> None:
    suffixes = Suffixes(3)
    for token in range(1, 500):
        suffixes.add([0, token] * (1 + token % 7))
    total, children = suffixes.frequent(state_of(suffixes, [0]))
    assert total == suffixes.counts[state_of(suffixes, [0])]
    assert 8 <= len(children) < 64
    assert {times for _, times, _ in children} == {7}
    token = children[0][0]
    suffixes.add([0, token])
    _, children = suffixes.frequent(state_of(suffixes, [0]))
    assert (token, 8) in [(token, times) for token, times, _ in children]


def test_few_children_are_all_shown_and_their_sum_leaves_out_ends_of_texts() -> None:
    suffixes = Suffixes(3)
    suffixes.add([1, 2, 1, 3, 1])
    total, children = suffixes.frequent(state_of(suffixes, [1]))
    assert total == 2
    assert [(token, times) for token, times, _ in children] == [(2, 1), (3, 1)]


@given(texts=texts, steps=st.lists(st.tuples(letters, st.integers(0, 14)), max_size=8), depth=depths)
def test_tokens_that_are_taken_back_leave_nothing(
    texts: list[list[int]], steps: list[tuple[list[int], int]], depth: int
) -> None:
    kept, text = Suffixes(depth, 200), texts[-1]
    for each in texts:
        kept.add(each)
    for new, gone in steps:
        for token in new:
            kept.append(token)
            kept.frequent(kept.window)
        text = [*text, *new]
        last = text[len(text) - min(gone, len(text)) :]
        assert kept.take_back(last)
        text = text[: len(text) - len(last)]
    fresh = Suffixes(depth)
    for each in [*texts[:-1], text]:
        fresh.add(each)
    for name in set(Suffixes.__slots__) - {"_before", "_frequent", "_moved"}:
        assert getattr(kept, name) == getattr(fresh, name), name


def test_more_is_not_taken_back_than_is_remembered_nor_across_texts() -> None:
    suffixes = Suffixes(4, 2)
    suffixes.add([1, 2, 3])
    assert not suffixes.take_back([1, 2, 3])
    suffixes.add([4])
    assert not suffixes.take_back([3, 4])
    assert suffixes.take_back([4])


def test_a_long_text_is_not_taken_in_again_where_its_last_tokens_come_and_go() -> None:
    """As those drafted by the other levels of a cascade do."""
    step, live, text = StepBudget(StateRoom(), 1), LiveText(6, ()), [place % 97 for place in range(2 * STEP_TOKENS)]
    for _ in range(3):
        step.begin([1])
        taken_in = live.follow(text, step)
    assert taken_in is not None
    for drafted in ([1, 2, 3], [4], [1, 2, 5, 6]):
        step.begin([1])
        assert live.follow([*text, *drafted], step) is not None
