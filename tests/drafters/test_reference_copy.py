"""LLMA copies from references after a match; with ``resync`` it follows a predicted output through its changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.drafters.copying.reference_copy import ReferenceCopy
from parlay.drafters.copying.reference_copy import ReferenceCopyOptions as Options
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.strategies.spelling import parse
from parlay.trees import is_chain
from parlay.types import NO_DRAFT, Request
from tests.drafters.sight import GREEDY, drafted, no_runner

RESOURCES = Resources(vocab_size=500, open_runner=no_runner)


def referring(*references: Sequence[int]) -> Request:
    return replace(GREEDY, references=tuple(map(tuple, references)))


def decode(drafter: ReferenceCopy, request: Request, answer: Sequence[int], budget: int) -> list[int]:
    """How many tokens each step commits when the target writes ``answer``."""
    tokens, committed = list(request.prompt), []
    while len(tokens) < len(request.prompt) + len(answer):
        left = answer[len(tokens) - len(request.prompt) :]
        draft = drafted(drafter, tokens, budget, request).tree.tokens
        same = next((at for at, token in enumerate(draft) if left[at : at + 1] != [token]), len(draft))
        committed.append(len(left[: same + 1]))
        tokens += left[: same + 1]
    return committed


def first_hit(references: Sequence[Sequence[int]], output: Sequence[int], longest: int, shortest: int) -> list[int]:
    """The paper's rule by brute force: all that follows the first occurrence of the longest match."""
    for size in range(min(longest, len(output)), shortest - 1, -1):
        for document in references:
            for at in range(size, len(document)):
                if list(document[at - size : at]) == list(output[-size:]):
                    return list(document[at:])
    return []


letters = st.lists(st.integers(1, 3), max_size=20)


@given(
    references=st.lists(letters, max_size=3),
    output=letters,
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted),
    budget=st.integers(1, 8),
)
def test_it_copies_what_follows_the_first_longest_match(
    references: list[list[int]], output: list[int], sizes: list[int], budget: int
) -> None:
    drafter = ReferenceCopy(RESOURCES, Options(min_ngram=sizes[0], max_ngram=sizes[1]))
    draft = drafted(drafter, [0, *output], budget, referring(*references))
    assert list(draft.tree.tokens) == first_hit(references, output, sizes[1], sizes[0])[:budget]
    assert is_chain(draft.tree)
    assert len(draft.scores) == len(draft.sources) == len(draft)


@pytest.mark.parametrize("block", [2, 5, 20])
def test_a_reference_that_is_the_answer_gives_a_block_per_step(block: int) -> None:
    """The paper's k counts the root: k tokens per step, after one token that nothing can match."""
    answer = list(range(100, 100 + 5 * block))
    committed = decode(ReferenceCopy(RESOURCES, Options()), referring(answer), answer, block - 1)
    assert committed[0] == 1
    assert set(committed[1:-1]) == {block}


def test_without_references_nothing_is_drafted() -> None:
    assert drafted(ReferenceCopy(RESOURCES, Options()), [0, 1, 0, 1], 5) == NO_DRAFT
    assert drafted(ReferenceCopy(RESOURCES, Options()), [0, 1], 5, referring((), ())) == NO_DRAFT


def test_the_prompt_is_neither_matched_nor_copied_from() -> None:
    request = replace(referring((7, 8, 9)), prompt=(1, 2, 7))
    assert drafted(ReferenceCopy(RESOURCES, Options()), [1, 2, 7], 5, request) == NO_DRAFT
    assert drafted(ReferenceCopy(RESOURCES, Options()), [1, 2, 7, 1], 5, request) == NO_DRAFT


def test_a_match_at_the_end_of_a_document_gives_way_to_a_shorter_one_that_goes_on() -> None:
    assert drafted(ReferenceCopy(RESOURCES, Options()), [0, 1, 2], 5, referring((2, 3), (1, 2))).tree.tokens == (3,)


def test_copies_end_with_their_document() -> None:
    assert drafted(ReferenceCopy(RESOURCES, Options()), [0, 1], 9, referring((1, 2, 3), (4, 5))).tree.tokens == (2, 3)


RESYNC = {"resync": True}
LINE = [1, 2, 3, 4, 5, 6]


def test_a_foretold_output_is_drafted_from_its_first_token() -> None:
    """The paper has nothing to match before there is output; a prediction says how the output begins."""
    answer = list(range(100, 140))
    assert drafted(ReferenceCopy(RESOURCES, Options()), [0], 5, referring(answer)) == NO_DRAFT
    assert decode(ReferenceCopy(RESOURCES, Options(resync=True)), referring(answer), answer, 9) == [
        10,
        10,
        10,
        10,
    ]


def test_after_a_change_it_goes_on_where_the_output_has_got_to() -> None:
    """The same line occurs five times: the paper's first hit would copy from the first again and again."""
    blocks = [[*LINE, mark] for mark in (20, 21, 22, 23, 24)]
    source = [token for block in blocks for token in block]
    answer = [*source[:17], 99, *source[18:]]
    request = referring(source)
    changed = [0, *answer[:19]]
    assert drafted(ReferenceCopy(RESOURCES, Options(resync=True)), changed, 4, request).tree.tokens == (
        6,
        22,
        1,
        2,
    )
    assert drafted(ReferenceCopy(RESOURCES, Options()), changed, 4, request).tree.tokens == (6, 20, 1, 2)


@pytest.mark.parametrize(
    ("answer", "steps"),
    [
        ([*range(100, 110), 7, *range(111, 130)], 3),
        ([*range(100, 110), 7, 8, *range(110, 130)], 4),
        ([*range(100, 110), *range(115, 130)], 2),
        ([7, *range(100, 130)], 3),
        ([*range(100, 130), 7, 8], 2),
    ],
    ids=["substitution", "insertion", "deletion", "another beginning", "more at the end"],
)
def test_every_kind_of_change_is_survived(answer: list[int], steps: int) -> None:
    request = referring(range(100, 130))
    assert len(decode(ReferenceCopy(RESOURCES, Options(resync=True)), request, answer, 63)) == steps


def test_a_coincidence_does_not_move_the_place_that_the_output_had_come_to() -> None:
    """Inserted tokens that happen to stand far ahead: the next sure match is still looked for at the break."""
    source = [*range(100, 110), *LINE, 50, *LINE, 51, 60, 61, *LINE, 52]
    output = [*range(100, 110), 60, 77, 1]
    draft = drafted(ReferenceCopy(RESOURCES, Options(resync=True)), [0, *output], 6, referring(source))
    assert draft.tree.tokens == (2, 3, 4, 5, 6, 50)


def test_what_stands_only_before_the_break_is_found_too() -> None:
    draft = drafted(ReferenceCopy(RESOURCES, Options(resync=True)), [0, 1, 2, 3, 4, 2], 2, referring((1, 2, 3, 4, 5)))
    assert draft.tree.tokens == (3, 4)


@given(
    edits=st.lists(st.tuples(st.integers(0, 15), letters), max_size=6),
    references=st.lists(letters, min_size=1, max_size=2),
    resync=st.booleans(),
)
def test_whatever_happened_before_it_proposes_what_a_fresh_one_would(
    edits: list[tuple[int, list[int]]], references: list[list[int]], resync: bool
) -> None:
    drafter, request = ReferenceCopy(RESOURCES, Options(resync=resync)), referring(*references)
    live = [0]
    for cut, new in edits:
        live[1 + cut :] = new
        assert drafted(drafter, live, 5, request) == drafted(
            ReferenceCopy(RESOURCES, Options(resync=resync)), live, 5, request
        )


@pytest.mark.parametrize("resync", [False, True])
def test_a_sequence_with_another_request_starts_over(resync: bool) -> None:
    drafter = ReferenceCopy(RESOURCES, Options(resync=resync))
    assert drafted(drafter, [0, 1], 5, referring((1, 2))).tree.tokens == (2,)
    assert drafted(drafter, [0, 1], 5, referring((1, 3))).tree.tokens == (3,)
    drafter.release(0)
    drafter.release(7)
    assert drafted(drafter, [0, 1], 5) == NO_DRAFT


def test_budgets_from_none_to_absurd() -> None:
    drafter = ReferenceCopy(RESOURCES, Options())
    assert drafted(drafter, [0, 1], 0, referring((1, 2))) == NO_DRAFT
    assert drafted(drafter, [0, 1], 10**9, referring((1, 2))).tree.tokens == (2,)


def test_ids_that_the_target_does_not_have_are_never_drafted() -> None:
    assert drafted(ReferenceCopy(RESOURCES, Options()), [0, 1], 5, referring((1, 2, 500, 3))).tree.tokens == (2,)


def test_contradicting_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="min_ngram 3 is more than max_ngram 2"):
        ReferenceCopy(RESOURCES, Options(max_ngram=2, min_ngram=3))
    with pytest.raises(UsageError, match="max_ngram must be at least 1, got 0"):
        parse("reference-copy:max_ngram=0")
