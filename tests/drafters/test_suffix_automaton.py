"""SAM decoding: the longest match, verbatim from the request or by frequency from past outputs; else the fallback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.drafters.resources import NestedStrategy, Resources
from parlay.drafters.stores.suffix_automaton import SuffixAutomaton
from parlay.drafters.stores.suffix_automaton import SuffixAutomatonOptions as Options
from parlay.options import Options as NoOptions
from parlay.options import UsageError
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.types import (
    NO_DRAFT,
    Draft,
    Drafter,
    Needs,
    Observation,
    Verdict,
    trees,
)
from tests.drafters.sight import GREEDY, Sight, drafted, no_runner

RESOURCES = Resources(vocab_size=100, open_runner=no_runner)


def learn(drafter: Drafter, *outputs: Sequence[int]) -> None:
    for output in outputs:
        drafter.observe([Observation(Sight(9, [0, *output]), NO_DRAFT, Verdict((), tuple(output[-1:])))])
        drafter.release(9)


letters = st.lists(st.integers(0, 2), min_size=1, max_size=24)


@given(references=st.lists(letters, max_size=2), tokens=letters, budget=st.integers(1, 6))
def test_it_copies_from_the_leftmost_of_the_longest_matches(
    references: list[list[int]], tokens: list[int], budget: int
) -> None:
    best: tuple[int, list[int]] = (0, [])
    for document in [*references, tokens]:
        for place in range(1, len(document) + 1):
            if document is tokens and place == len(tokens):
                continue
            length = 0
            while length < min(place, len(tokens)) and document[place - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > best[0]:
                best = (length, document[place : place + budget])
    request = replace(GREEDY, references=tuple(map(tuple, references)))
    draft = drafted(SuffixAutomaton(RESOURCES, Options()), tokens, budget, request)
    assert list(draft.tree.tokens) == best[1]
    assert trees.is_chain(draft.tree)


def test_past_outputs_are_copied_only_if_their_match_is_longer_by_more_than_the_bias() -> None:
    past, own = [1, 2, 3, 4, 5, 6, 7, 8, 50], [8, 60]
    for matching in range(1, 9):
        drafter = SuffixAutomaton(RESOURCES, Options(bias=3))
        learn(drafter, past)
        draft = drafted(drafter, [0, *own, 99, *past[8 - matching : 8]], 1)
        assert draft.tree.tokens == ((50,) if matching - 3 > 1 else (60,))


def test_past_outputs_are_followed_along_what_came_most_often() -> None:
    drafter = SuffixAutomaton(RESOURCES, Options(bias=0))
    learn(drafter, [1, 2, 3, 9], [1, 2, 4, 5], [7, 1, 2, 4, 6], [8, 1, 2, 4, 6])
    assert drafted(drafter, [0, 1, 2], 4).tree.tokens == (4, 6)


def test_a_match_at_the_very_end_of_an_output_leaves_the_draft_to_its_shorter_ends() -> None:
    drafter = SuffixAutomaton(RESOURCES, Options(bias=0))
    learn(drafter, [5, 6, 7], [7, 8])
    assert drafted(drafter, [0, 5, 6, 7], 4).tree.tokens == (8,)
    learn(other := SuffixAutomaton(RESOURCES, Options(bias=0)), [5, 6, 7])
    assert drafted(other, [0, 5, 6, 7], 4) == NO_DRAFT


class Counting:
    """Proposes 90 and says what reached it."""

    needs = Needs(top_k=3)

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.seen: list[Observation] = []
        self.released: list[int] = []

    def propose(self, views: Sequence[Sight], budgets: Sequence[int]) -> list[Draft]:
        self.asked.append([view.sequence for view in views])
        return [trees.chain([90], "counting", [0.5]) for _ in views]

    def observe(self, observations: Sequence[Observation]) -> None:
        self.seen += observations

    def release(self, sequence: int) -> None:
        self.released.append(sequence)


def test_short_matches_are_left_to_the_fallback_for_all_sequences_at_once() -> None:
    inner = Counting()
    nested = NestedStrategy("counting", "counting", 8, NoOptions(), lambda: inner)
    drafter = SuffixAutomaton(replace(RESOURCES, nested=(nested,)), Options(min_match=3, fallback=("counting",)))
    assert drafter.needs.top_k == 3
    long, short, none = [1, 2, 3, 4, 1, 2, 3], [1, 2, 9, 1, 2], [1]
    views = [Sight(0, long), Sight(1, short), Sight(2, none), Sight(3, short)]
    drafts = drafter.propose(views, [2, 2, 2, 0])
    assert [draft.tree.tokens for draft in drafts] == [(4, 1), (90,), (90,), ()]
    assert inner.asked == [[1, 2]]
    observation = Observation(views[0], drafts[0], Verdict((), (4,)))
    drafter.observe([observation])
    drafter.release(0)
    assert (inner.seen, inner.released) == ([observation], [0])


def test_without_a_fallback_short_matches_are_copied_all_the_same() -> None:
    assert drafted(SuffixAutomaton(RESOURCES, Options()), [0, 1, 2, 1], 3).tree.tokens == (2, 1)


def test_copies_end_with_a_stop_token_and_with_the_reference() -> None:
    request = replace(GREEDY, stop_ids=frozenset({4}), references=((7, 8),))
    assert drafted(SuffixAutomaton(RESOURCES, Options()), [0, 1, 2, 3, 4, 5, 1, 2], 9, request).tree.tokens == (3, 4)
    assert drafted(SuffixAutomaton(RESOURCES, Options()), [0, 7], 9, request).tree.tokens == (8,)
    drafter = SuffixAutomaton(RESOURCES, Options(bias=0))
    learn(drafter, [1, 2, 3, 4, 5])
    assert drafted(drafter, [0, 1, 2], 9, replace(GREEDY, stop_ids=frozenset({4}))).tree.tokens == (3, 4)


def test_text_that_repeats_is_continued_by_the_whole_budget_however_long_the_match() -> None:
    period = list(range(10))
    draft = drafted(SuffixAutomaton(RESOURCES, Options()), period * 20, 40)
    assert list(draft.tree.tokens) == period * 4
    assert 0.9 < draft.scores[0] < 1


def test_sequences_are_told_apart_forgotten_and_survive_cuts() -> None:
    drafter = SuffixAutomaton(RESOURCES, Options())
    live = [1, 2, 3, 1]
    views = [Sight(0, live), Sight(1, [1, 3, 1]), Sight(2, [1, 1])]
    assert [draft.tree.tokens for draft in drafter.propose(views, [4, 1, 0])] == [(2, 3, 1), (3,), ()]
    live[1:] = [5, 6, 1]
    assert drafter.propose(views[:1], [2])[0].tree.tokens == (5, 6)
    for sequence in (0, 0, 7):
        drafter.release(sequence)
    assert drafted(drafter, [7], 4) == NO_DRAFT


def test_fallbacks_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="must name one drafter or none"):
        build(parse("suffix-automaton:fallback=prompt-lookup+token-recycling"), RESOURCES)
    with pytest.raises(UsageError, match="none drafts nothing"):
        build(parse("suffix-automaton:fallback=none"), RESOURCES)
    with pytest.raises(UsageError, match="did you mean prompt-lookup"):
        build(parse("suffix-automaton:fallback=promt-lookup"), RESOURCES)


@pytest.mark.parametrize("wrong", ["min_match=0", "min_match=65", "bias=-1", "max_tokens=0", "save_every=none"])
def test_parameters_out_of_range_are_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong.partition("=")[0]):
        parse(f"suffix-automaton:{wrong}")
