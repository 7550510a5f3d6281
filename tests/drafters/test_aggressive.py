"""Input-guided aggressive decoding: the output is its source until it is not, and is found again where it is unique."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.drafters.copying.aggressive import Aggressive
from parlay.drafters.copying.aggressive import AggressiveOptions as Options
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.strategies.spelling import parse
from parlay.types import NO_DRAFT, Request
from tests.drafters.sight import GREEDY, drafted, no_runner

RESOURCES = Resources(vocab_size=500, open_runner=no_runner)


def correcting(*source: int) -> Request:
    return replace(GREEDY, references=(source,))


def decode(request: Request, answer: Sequence[int], budget: int) -> list[int]:
    """How many drafted tokens are accepted in each step when the target writes ``answer``."""
    drafter, tokens, accepted = Aggressive(RESOURCES, Options()), list(request.prompt), []
    while len(tokens) < len(request.prompt) + len(answer):
        left = answer[len(tokens) - len(request.prompt) :]
        draft = drafted(drafter, tokens, budget, request).tree.tokens
        same = next((at for at, token in enumerate(draft) if left[at : at + 1] != [token]), len(draft))
        tokens += left[: same + 1]
        accepted.append(same)
    return accepted


@pytest.mark.parametrize("budget", [1, 4, 10, 63])
def test_an_output_that_equals_its_source_takes_one_step_per_draft(budget: int) -> None:
    source = list(range(100, 140))
    steps = len(decode(correcting(*source), source, budget))
    assert steps <= -(-len(source) // budget) + 1
    assert steps == -(-len(source) // (budget + 1))


def test_one_substitution_costs_one_more_step() -> None:
    """The first draft ends at the substituted token; the token after it is unique, and the rest is the second draft."""
    source = list(range(100, 140))
    assert decode(correcting(*source), [*source[:20], 7, *source[21:]], 63) == [20, 0, 18]


def test_insertions_and_deletions_are_found_again_too() -> None:
    source = list(range(100, 120))
    assert decode(correcting(*source), [*source[:5], 7, 8, *source[5:]], 63) == [5, 0, 0, 14]
    assert decode(correcting(*source), [*source[:5], *source[9:]], 63) == [5, 10]


def test_what_the_source_has_twice_is_no_reason_to_jump() -> None:
    request = correcting(1, 2, 3, 4, 2, 3, 5)
    assert drafted(Aggressive(RESOURCES, Options()), [0, 9, 2], 5, request) == NO_DRAFT
    assert drafted(Aggressive(RESOURCES, Options()), [0, 9, 2, 3], 5, request) == NO_DRAFT


def test_the_shortest_unique_suffix_decides() -> None:
    request = correcting(1, 2, 3, 4, 2, 5)
    assert drafted(Aggressive(RESOURCES, Options()), [0, 9, 4, 2], 5, request).tree.tokens == (5,)
    assert drafted(Aggressive(RESOURCES, Options()), [0, 9, 1, 2], 5, request).tree.tokens == (3, 4, 2, 5)


def test_the_search_stops_at_a_suffix_that_the_source_lacks() -> None:
    """2 is ambiguous and 9 2 unknown: what stands before them is not asked."""
    assert drafted(Aggressive(RESOURCES, Options()), [0, 9, 1, 9, 2], 5, correcting(1, 2, 3, 4, 2, 5)) == NO_DRAFT


def test_a_suffix_at_the_end_of_the_source_counts_as_an_occurrence() -> None:
    assert drafted(Aggressive(RESOURCES, Options()), [0, 9, 2], 5, correcting(1, 2, 3, 2)) == NO_DRAFT


def test_longer_suffixes_than_asked_for_are_not_looked_at() -> None:
    """Only 4 2 3 is unique, its shorter ends are not."""
    request = correcting(4, 2, 3, 8, 4, 2, 7, 1, 2, 3, 9)
    assert drafted(Aggressive(RESOURCES, Options(ngram=3)), [0, 50, 4, 2, 3], 2, request).tree.tokens == (
        8,
        4,
    )
    assert drafted(Aggressive(RESOURCES, Options(ngram=2)), [0, 50, 4, 2, 3], 2, request) == NO_DRAFT


def test_the_source_is_the_prompt_where_there_are_no_references() -> None:
    request = replace(GREEDY, prompt=(5, 6, 7, 8))
    assert drafted(Aggressive(RESOURCES, Options()), [5, 6, 7, 8], 9, request).tree.tokens == (5, 6, 7, 8)
    assert drafted(Aggressive(RESOURCES, Options()), [5, 6, 7, 8, 6], 9, request).tree.tokens == (7, 8)


def test_it_starts_with_the_first_reference_and_never_copies_past_its_end() -> None:
    request = replace(GREEDY, references=((1, 2), (3, 4, 5)))
    assert drafted(Aggressive(RESOURCES, Options()), [0], 9, request).tree.tokens == (1, 2)
    assert drafted(Aggressive(RESOURCES, Options()), [0, 1, 2], 9, request) == NO_DRAFT
    assert drafted(Aggressive(RESOURCES, Options()), [0, 1, 2, 3], 9, request).tree.tokens == (4, 5)


@given(
    edits=st.lists(st.tuples(st.integers(0, 15), st.lists(st.integers(1, 4), max_size=9)), max_size=6),
    source=st.lists(st.integers(1, 4), max_size=20),
)
def test_whatever_happened_before_it_proposes_what_a_fresh_one_would(
    edits: list[tuple[int, list[int]]], source: list[int]
) -> None:
    drafter, request = Aggressive(RESOURCES, Options()), correcting(*source)
    live = [0]
    for cut, new in edits:
        live[1 + cut :] = new
        draft = drafted(drafter, live, 5, request)
        assert draft == drafted(Aggressive(RESOURCES, Options()), live, 5, request)
        assert len(draft.scores) == len(draft.sources) == len(draft)


def test_bad_input_gives_no_draft() -> None:
    drafter = Aggressive(RESOURCES, Options())
    assert drafted(drafter, [0], 0, correcting(1, 2)) == NO_DRAFT
    assert drafted(drafter, [0], 5, correcting()) == NO_DRAFT
    assert drafted(drafter, [0], 5, correcting(500, 1)) == NO_DRAFT, "an id that the target does not have"
    assert drafted(drafter, [0], 10**9, correcting(1, 2)).tree.tokens == (1, 2)


def test_a_sequence_with_another_request_starts_over() -> None:
    drafter = Aggressive(RESOURCES, Options())
    assert drafted(drafter, [0, 1], 5, correcting(1, 2)).tree.tokens == (2,)
    assert drafted(drafter, [0, 1], 5, correcting(1, 3)).tree.tokens == (3,)
    drafter.release(0)
    drafter.release(7)
    assert drafted(drafter, [0], 5, correcting(4)).tree.tokens == (4,)


def test_levels_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="ngram must be at least 1, got 0"):
        parse("aggressive:ngram=0")
