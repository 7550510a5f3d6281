"""SuffixDecoding against frequencies and choices by brute force, and what it learns across requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.drafters.resources import Resources
from parlay.drafters.stores.suffix_decoding import SuffixDecoding
from parlay.drafters.stores.suffix_decoding import SuffixDecodingOptions as Options
from parlay.drafters.stores.suffix_tree import NOTHING, SuffixDraft, SuffixGrowth, grow, speculate
from parlay.drafters.stores.suffixes import Suffixes
from parlay.options import UsageError
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.types import NO_DRAFT, Observation, Request, Verdict, trees
from tests.drafters.sight import GREEDY, Sight, drafted, no_runner

RESOURCES = Resources(vocab_size=50, open_runner=no_runner)


def learn(drafter: SuffixDecoding, output: Sequence[int], request: Request = GREEDY) -> None:
    view = Sight(9, [0, *output], request)
    drafter.observe([Observation(view, NO_DRAFT, Verdict((), tuple(output[-1:])))])
    drafter.release(9)


def growth(
    k: int = 8, factor: float = 1.0, offset: float = 0.0, min_prob: float = 0.1, branching: bool = True
) -> SuffixGrowth:
    return SuffixGrowth(k, factor, offset, min_prob, branching, frozenset())


letters = st.lists(st.integers(0, 2), min_size=1, max_size=16)
texts = st.lists(letters, min_size=1, max_size=4)


def followers(texts: Sequence[Sequence[int]], before: Sequence[int]) -> Counter[int]:
    """What came after ``before`` in the texts, by looking at every place."""
    size, wanted = len(before), list(before)
    return Counter(
        text[start + size]
        for text in texts
        for start in range(len(text) - size)
        if list(text[start : start + size]) == wanted
    )


def counted(texts: Sequence[Sequence[int]], depth: int = 64) -> Suffixes:
    suffixes = Suffixes(depth)
    for text in texts:
        suffixes.add(text)
    return suffixes


@given(
    texts=texts, query=letters, k=st.integers(1, 12), branching=st.booleans(), min_prob=st.sampled_from([0, 0.1, 0.4])
)
def test_path_probabilities_are_conditional_frequencies(
    texts: list[list[int]], query: list[int], k: int, branching: bool, min_prob: float
) -> None:
    suffixes = counted(texts)
    state, length = suffixes.match(query)
    if length == 0:
        return
    found = grow(suffixes, state, length, growth(k, 0.0, k, min_prob, branching), 0.0)
    if found is None:
        after = followers(texts, query[-length:])
        assert all(times < min_prob * after.total() for times in after.values())
        return
    tree = trees.Tree(found.tokens, found.parents)
    reached = 0.0
    for node, share in enumerate(found.shares):
        path = [found.tokens[above] for above in trees.path_to(tree, node)]
        after = followers(texts, [*query[-length:], *path[:-1]])
        assert share == after[path[-1]] / after.total()
        product = 1.0
        for above in trees.path_to(tree, node):
            product *= found.shares[above]
        assert product >= min_prob - 1e-9
        reached += product
    assert found.score == pytest.approx(reached)
    if not branching:
        assert trees.is_chain(tree)


@given(texts=texts, query=letters, k=st.integers(1, 6), branching=st.booleans())
def test_no_other_tree_of_that_size_has_a_larger_score(
    texts: list[list[int]], query: list[int], k: int, branching: bool
) -> None:
    """With branches: the sum of the k largest path probabilities there are."""
    suffixes = counted(texts)
    state, length = suffixes.match(query)
    if length == 0 or not branching:
        return
    found = grow(suffixes, state, length, growth(k, 0.0, k, 0.0), 0.0)
    probabilities: list[float] = []

    def walk(before: list[int], reach: float, left: int) -> None:
        after = followers(texts, before)
        for token, times in after.items() if left else ():
            probabilities.append(reach * times / after.total())
            walk([*before, token], probabilities[-1], left - 1)

    walk(query[-length:], 1.0, k)
    assert (found.score if found else 0.0) == pytest.approx(sum(sorted(probabilities, reverse=True)[:k]))


@given(
    texts=texts, query=letters, k=st.integers(1, 8), factor=st.sampled_from([0.5, 1.0, 2.0]), offset=st.integers(-1, 3)
)
def test_the_best_match_length_wins_and_of_equal_ones_the_longer(
    texts: list[list[int]], query: list[int], k: int, factor: float, offset: int
) -> None:
    """Skipping what can't win changes nothing: the choice is that of growing every length."""
    suffixes = counted(texts)
    rule = growth(k, factor, offset)
    best = NOTHING
    for length in range(len(query), 0, -1):
        state, matched = suffixes.match(query[-length:])
        if matched == length:
            found = grow(suffixes, state, length, rule, -1.0)
            if found is not None and found.score > best.score:
                best = found
    assert speculate(suffixes, *suffixes.match(query), rule, NOTHING) == best


def test_a_longer_match_gets_a_larger_budget() -> None:
    text = list(range(1, 20))
    for matching in range(1, 6):
        tokens = [0, *text, 40, *text[:matching]]
        drafts = [
            drafted(SuffixDecoding(RESOURCES, Options(**options)), tokens, 10) for options in ({}, {"factor": 2.0})
        ]
        assert [len(draft) for draft in drafts] == [matching, 2 * matching]
    assert len(drafted(SuffixDecoding(RESOURCES, Options(offset=3.0)), [0, *text, 40, 1], 10)) == 4
    assert len(drafted(SuffixDecoding(RESOURCES, Options()), [0, *text, *text[:9]], 4)) == 4


def test_tree_and_path_and_probabilities_worked_by_hand() -> None:
    """After 1 2 came 3 twice and 4 once; after 3 came 5 each time."""
    tokens = [0, 1, 2, 3, 5, 6, 1, 2, 4, 7, 1, 2, 3, 5, 8, 1, 2]
    tree = drafted(SuffixDecoding(RESOURCES, Options(offset=1.0)), tokens, 3)
    assert (tree.tree.tokens, tree.tree.parents) == ((3, 5, 4), (-1, 0, -1))
    path = drafted(SuffixDecoding(RESOURCES, Options(offset=1.0, shape="path")), tokens, 3)
    assert path.tree.tokens[:2] == (3, 5)
    assert trees.is_chain(path.tree)
    assert len(drafted(SuffixDecoding(RESOURCES, Options(offset=1.0, min_prob=0.5)), tokens, 3)) == 2


def test_scores_are_shares_tempered_by_how_long_the_text_agrees() -> None:
    sure = drafted(SuffixDecoding(RESOURCES, Options()), [0, 1, 2, 3, 4, 5, 6, 1, 2, 3], 3)
    split = drafted(SuffixDecoding(RESOURCES, Options()), [0, 1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 3)
    assert sure.scores == (3 / 5, 4 / 6, 5 / 7)
    assert split.scores[0] == 3 / 5 / 2


def test_match_and_draft_stay_within_the_depth() -> None:
    text = list(range(1, 30))
    for matching in range(1, 12):
        draft = drafted(SuffixDecoding(RESOURCES, Options(depth=8, factor=8.0)), [0, *text, *text[:matching]], 30)
        assert 1 <= len(draft) < 8


def test_a_very_long_match_still_leaves_room_for_a_draft() -> None:
    """As long as the whole depth, it would leave one token; half as long a match has the same continuations."""
    text = list(range(1, 50)) * 4
    for budget in (1, 8, 32):
        assert list(drafted(SuffixDecoding(RESOURCES, Options()), text, budget).tree.tokens) == text[:budget]


def test_references_and_own_text_come_before_equal_past_outputs() -> None:
    drafter = SuffixDecoding(RESOURCES, Options())
    learn(drafter, [1, 2, 3])
    assert drafted(drafter, [0, 1, 2], 4).tree.tokens == (3,)
    assert drafted(drafter, [0, 1, 2, 4, 5, 1, 2], 4).tree.tokens == (4, 5)
    request = replace(GREEDY, references=((1, 2, 6, 7),))
    assert drafter.propose([Sight(1, [0, 1, 2], request)], [4])[0].tree.tokens == (6, 7)


def test_a_surer_past_output_beats_the_own_text() -> None:
    drafter = SuffixDecoding(RESOURCES, Options())
    learn(drafter, [1, 2, 3, 4, 5])
    assert drafted(drafter, [0, 3, 9, 1, 2, 3], 8).tree.tokens == (4, 5)


def test_nothing_is_drafted_below_a_stop_token() -> None:
    request = replace(GREEDY, stop_ids=frozenset({5}))
    assert drafted(SuffixDecoding(RESOURCES, Options()), [0, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3], 8, request).tree.tokens == (
        4,
        5,
    )


def test_drafts_name_their_source_and_keep_to_their_budget() -> None:
    tokens = [0, 1, 2, 1, 3, 1, 2, 1, 3, 1] * 3
    for budget in range(9):
        draft = drafted(SuffixDecoding(RESOURCES, Options(factor=9.0)), tokens, budget)
        assert len(draft) <= budget
        assert set(draft.sources) <= {"suffix-decoding"}
        assert all(0 <= score <= 1 for score in draft.scores)
        assert all(parent < node for node, parent in enumerate(draft.tree.parents))
    assert len(drafted(SuffixDecoding(RESOURCES, Options(factor=64.0)), tokens, 1024)) <= 1024


def test_sequences_are_told_apart_and_forgotten() -> None:
    drafter = SuffixDecoding(RESOURCES, Options())
    views = [Sight(0, [1, 2, 1]), Sight(1, [1, 3, 1]), Sight(2, [1, 1, 1])]
    drafts = drafter.propose(views, [4, 1, 0])
    assert [draft.tree.tokens for draft in drafts] == [(2,), (3,), ()]
    for sequence in (0, 0, 5):
        drafter.release(sequence)
    assert drafter.propose([Sight(0, [7])], [4]) == [NO_DRAFT]


def test_the_store_named_by_the_user_is_loaded_and_saved(tmp_path: Path) -> None:
    spec = parse(f"suffix-decoding:store={tmp_path / 'past.store'}")
    with ExitStack() as closing:
        first = build(spec, replace(RESOURCES, closing=closing))
        assert isinstance(first, SuffixDecoding)
        learn(first, [1, 2, 3])
    second = build(spec, RESOURCES)
    assert isinstance(second, SuffixDecoding)
    assert drafted(second, [0, 1, 2], 4).tree.tokens == (3,)
    with pytest.raises(UsageError, match="vocabulary of 50, this target has 51"):
        build(spec, replace(RESOURCES, vocab_size=51))


@pytest.mark.parametrize(
    "wrong", ["depth=1", "factor=-1", "min_prob=1.5", "shape=star", "max_tokens=0", "save_every=0"]
)
def test_parameters_out_of_range_are_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong.partition("=")[0]):
        parse(f"suffix-decoding:{wrong}")


def test_an_empty_speculation_is_no_draft() -> None:
    assert SuffixDraft().draft("made") == NO_DRAFT
