"""Trie lookahead: frequencies of request and past outputs, mixed; shorter queries where longer ones yield little."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.drafters.resources import Resources
from parlay.drafters.stores.trie_lookahead import TrieLookahead
from parlay.drafters.stores.trie_lookahead import TrieLookaheadOptions as Options
from parlay.options import UsageError
from parlay.strategies.spelling import parse
from parlay.types import NO_DRAFT, Draft, Observation, Request, Verdict, trees
from tests.drafters.sight import GREEDY, Sight, drafted, no_runner

RESOURCES = Resources(vocab_size=100, open_runner=no_runner)


def learn(drafter: TrieLookahead, *outputs: Sequence[int], request: Request = GREEDY) -> None:
    for output in outputs:
        drafter.observe([Observation(Sight(9, [0, *output], request), NO_DRAFT, Verdict((), tuple(output[-1:])))])
        drafter.release(9)


def branches(draft: Draft) -> set[tuple[int, ...]]:
    """The path of tokens to each node."""
    return {tuple(draft.tree.tokens[above] for above in trees.path_to(draft.tree, node)) for node in range(len(draft))}


letters = st.lists(st.integers(0, 2), min_size=1, max_size=14)


def frequencies(texts: Sequence[Sequence[int]], query: Sequence[int], longest: int) -> Counter[tuple[int, ...]]:
    """How often each branch followed the query, by looking at every place."""
    found: Counter[tuple[int, ...]] = Counter()
    size = len(query)
    for text in texts:
        for start in range(len(text) - size):
            if list(text[start : start + size]) == list(query):
                after = text[start + size : start + size + longest]
                found.update(tuple(after[:length]) for length in range(1, len(after) + 1))
    return found


@given(
    prompt=letters,
    outputs=st.lists(letters, max_size=3),
    budget=st.integers(1, 10),
    weight=st.sampled_from([0.0, 1e-4, 0.5, 1.0]),
)
def test_the_branches_taken_are_the_most_frequent_ones(
    prompt: list[int], outputs: list[list[int]], budget: int, weight: float
) -> None:
    """Half the budget by mixed frequency; the rest by output frequency, below what is in the tree or its root."""
    drafter = TrieLookahead(RESOURCES, Options(max_query=1, branch_length=4, output_weight=weight))
    learn(drafter, *outputs)
    taken = branches(drafted(drafter, prompt, budget))
    inputs, past = frequencies([prompt], prompt[-1:], 4), frequencies(outputs, prompt[-1:], 4)
    mixed = {branch: (1 - weight) * inputs[branch] + weight * past[branch] for branch in {*inputs, *past}}
    assert taken <= mixed.keys()
    assert len(taken) == min(budget, len(mixed))
    half = sorted(mixed.values(), reverse=True)[: (budget + 1) // 2]
    assert sum(sorted((mixed[branch] for branch in taken), reverse=True)[: len(half)]) == pytest.approx(sum(half))
    reserved = sorted(past.values(), reverse=True)[: budget // 2]
    assert sum(sorted((past[branch] for branch in taken), reverse=True)[: len(reserved)]) >= sum(reserved) - 1e-9


def test_a_longer_query_is_enough_if_it_fills_half_the_budget() -> None:
    tokens = [0, 1, 2, 3, 4, 5, 6, 7, 8, 2, 9, 1, 2]
    longer = TrieLookahead(RESOURCES, Options(branch_length=3))
    assert branches(drafted(longer, tokens, 4)) == {(3,), (3, 4), (3, 4, 5)}
    assert branches(drafted(longer, tokens, 8)) >= {(3,), (3, 4), (3, 4, 5), (9,), (9, 1), (9, 1, 2)}


def test_a_shorter_query_adds_to_what_the_longer_one_found_and_repeats_nothing() -> None:
    drafter = TrieLookahead(RESOURCES, Options())
    draft = drafted(drafter, [0, 1, 2, 3, 8, 2, 3, 9, 2, 4, 1, 2], 60)
    found = [tuple(draft.tree.tokens[above] for above in trees.path_to(draft.tree, node)) for node in range(len(draft))]
    assert len(found) == len(set(found))
    assert found[0] == (3,)
    assert {(3, 8), (3, 9), (4,)} <= set(found)


def test_branches_have_at_most_their_length() -> None:
    text = list(range(1, 60))
    for length in (1, 5, 12):
        draft = drafted(TrieLookahead(RESOURCES, Options(branch_length=length)), [0, *text, 1], 63)
        assert max(trees.depths(draft.tree)) == length


def test_request_comes_first_and_half_the_budget_goes_to_past_outputs() -> None:
    drafter = TrieLookahead(RESOURCES, Options(max_query=1, branch_length=4))
    learn(drafter, [1, 20, 21, 22, 23], [1, 20, 21, 22, 23])
    draft = drafted(drafter, [0, 1, 2, 3, 4, 5, 6, 1], 6)
    assert branches(draft) == {(2,), (2, 3), (2, 3, 4), (20,), (20, 21), (20, 21, 22)}
    assert draft.tree.tokens[:3] == (2, 3, 4)


def test_input_frequencies_are_gone_when_the_request_ends() -> None:
    drafter = TrieLookahead(RESOURCES, Options())
    assert drafted(drafter, [0, 1, 2, 3, 1, 2], 4).tree.tokens[0] == 3
    drafter.release(0)
    assert drafted(drafter, [0, 1, 2], 4) == NO_DRAFT


def test_the_oldest_outputs_go_when_the_store_is_full() -> None:
    drafter = TrieLookahead(RESOURCES, Options(max_tokens=6))
    learn(drafter, [1, 2, 3], [1, 2, 4], [1, 2, 5])
    assert branches(drafted(drafter, [0, 1, 2], 9)) == {(4,), (5,)}


def test_one_branch_is_a_chain() -> None:
    drafter = TrieLookahead(RESOURCES, Options(shape="path"))
    draft = drafted(drafter, [0, 1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 5, 7, 1, 2], 8)
    assert trees.is_chain(draft.tree)
    assert draft.tree.tokens[0] == 5


def test_nothing_is_drafted_below_a_stop_token() -> None:
    request = replace(GREEDY, stop_ids=frozenset({4}))
    assert branches(drafted(TrieLookahead(RESOURCES, Options()), [0, 1, 2, 3, 4, 5, 1, 2], 9, request)) == {
        (3,),
        (3, 4),
    }


def test_budgets_are_kept_and_scores_are_chances() -> None:
    drafter = TrieLookahead(RESOURCES, Options())
    learn(drafter, [place % 7 for place in range(300)], [place * place % 11 for place in range(300)])
    for budget in (0, 1, 2, 7, 63, 1024):
        draft = drafted(drafter, [0, *range(1, 9), 1, 2], budget)
        assert len(draft) <= budget
        assert all(0 < score < 1 for score in draft.scores)
        assert len(draft.scores) == len(draft.sources) == len(draft)


@pytest.mark.parametrize(
    "wrong", ["branch_length=0", "max_query=0", "output_weight=2", "shape=parallel", "max_tokens=0"]
)
def test_parameters_out_of_range_are_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong.partition("=")[0]):
        parse(f"trie-lookahead:{wrong}")
