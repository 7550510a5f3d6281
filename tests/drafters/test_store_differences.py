"""What sets the drafters with stores apart, from each other and from prompt lookup: one input, another draft each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest

from parlay.drafters.resources import Resources
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.types import NO_DRAFT, Draft, Drafter, Observation, Verdict, trees
from tests.drafters.sight import Sight, no_runner


def made(spec: str, *past: Sequence[int], preferred: Sequence[int] = ()) -> Drafter:
    """A drafter that saw requests with these outputs; after the last token but one the target liked ``preferred``."""
    drafter = build(parse(spec), Resources(100, no_runner))
    assert drafter is not None
    for output in past:
        view = Sight(9, [0, *output])
        verdict = Verdict((), (output[-1],))
        drafter.observe([Observation(view, NO_DRAFT, verdict, top_k=(tuple(preferred or output[-1:]),))])
        drafter.release(9)
    return drafter


def first(drafter: Drafter, tokens: list[int], budget: int) -> Draft:
    return drafter.propose([Sight(0, tokens)], [budget])[0]


NAMES = ("prompt-lookup", "trie-lookahead", "suffix-decoding", "suffix-automaton", "token-recycling")


@pytest.mark.parametrize(("one", "other"), list(combinations(NAMES, 2)))
def test_on_one_input_each_pair_drafts_something_else(one: str, other: str) -> None:
    """1 2 came twice and went on as 3 9 and as 4 8; a past output ended with 2 5, where the target also liked 7."""
    tokens = [0, 1, 2, 3, 9, 1, 2, 4, 8, 1, 2]
    drafts = {name: first(made(name, [6, 2, 5], preferred=(5, 7)), tokens, 4) for name in (one, other)}
    expected = {
        "prompt-lookup": (4, 8, 1, 2),  # the most recent match, verbatim
        "suffix-automaton": (3, 9, 1, 2),  # the first
        "suffix-decoding": (3, 4),  # both, as two tokens match
        "token-recycling": (5, 7),  # what the target liked after 2
    }
    for name, draft in drafts.items():
        assert draft.tree.tokens == expected.get(name, draft.tree.tokens)
    assert drafts[one].tree != drafts[other].tree


def test_long_contexts_decide_for_suffixes_and_not_for_a_trie_of_short_queries() -> None:
    """2 3 mostly went on with 4; after 1 2 3 it was 5."""
    tokens = [0, 1, 2, 3, 5, 9, 2, 3, 4, 8, 2, 3, 4, 7, 1, 2, 3]
    assert first(made("trie-lookahead"), tokens, 1).tree.tokens == (4,)
    assert first(made("suffix-decoding"), tokens, 1).tree.tokens == (5,)
    assert first(made("suffix-automaton"), tokens, 1).tree.tokens == (5,)


def test_a_trie_drafts_its_whole_budget_after_a_short_match_and_suffix_decoding_one_token() -> None:
    tokens = [0, *range(1, 40), 1]
    assert len(first(made("suffix-decoding"), tokens, 8)) == 1
    assert len(first(made("trie-lookahead"), tokens, 8)) == 8
    assert len(first(made("suffix-automaton"), tokens, 8)) == 8


def test_frequency_decides_for_suffix_decoding_and_place_for_sam_and_prompt_lookup() -> None:
    tokens = [0, 1, 2, 3, 9, 1, 2, 5, 8, 1, 2, 5, 7, 1, 2, 4, 6, 1, 2]
    assert first(made("suffix-decoding"), tokens, 1).tree.tokens == (5,)
    assert first(made("suffix-automaton"), tokens, 1).tree.tokens == (3,)
    assert first(made("prompt-lookup"), tokens, 1).tree.tokens == (4,)


def test_suffix_decoding_may_prefer_a_surer_short_match_and_sam_never_does() -> None:
    """After 1 2 3 came four different tokens; after 2 3 in a past output always 9 10 11."""
    tokens = [0, 1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 6, 1, 2, 3, 7, 1, 2, 3]
    past = [2, 3, 9, 10, 11]
    assert first(made("suffix-decoding", past), tokens, 2).tree.tokens == (9, 10)
    assert first(made("suffix-automaton", past), tokens, 2).tree.tokens == (4, 1)


def test_past_outputs_serve_all_but_prompt_lookup() -> None:
    tokens, past = [0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]
    for name in NAMES[1:]:
        assert first(made(name, past), tokens, 2).tree.tokens == (7,)
    assert first(made("prompt-lookup", past), tokens, 2) == NO_DRAFT


def test_recycling_alone_proposes_what_no_text_holds_and_alone_needs_no_text() -> None:
    recycling = made("token-recycling", [6, 2, 5], preferred=(5, 70, 71))
    assert first(recycling, [0, 2], 8).tree.tokens == (5, 70, 71)
    assert not trees.is_chain(first(recycling, [0, 2], 8).tree)
    text = [0, *[3, 4] * 10, 3]
    assert first(made("token-recycling"), text, 8) == NO_DRAFT
    for name in NAMES[:-1]:
        assert len(first(made(name), text, 8))
