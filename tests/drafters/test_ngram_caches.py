"""Lookup decoding: every threshold, the order of the caches, and what past requests leave behind for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.drafters.counting.ngram_caches import LAX, LONGEST, STRICT, Bars, NgramCaches
from parlay.drafters.counting.ngram_caches import NgramCachesOptions as Options
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.strategies.spelling import parse
from parlay.testing.conformance.stages import ngram_model
from parlay.types import NO_DRAFT, Observation, Request, Verdict
from tests.drafters.sight import GREEDY, Sight, drafted, no_runner

VOCAB = 500
RESOURCES = Resources(VOCAB, no_runner)


def knowing(corpus: Sequence[Sequence[int]]) -> Resources:
    """With an n-gram model of these texts, whatever file is named."""
    return replace(RESOURCES, open_ngrams=lambda _: ngram_model(corpus, VOCAB))


def finish(drafter: NgramCaches, tokens: Sequence[int], request: Request = GREEDY) -> None:
    """A request with this text is over."""
    drafter.observe([Observation(Sight(9, tokens, request), NO_DRAFT, Verdict((), (1,)))])
    drafter.release(9)


def sightings(size: int, *followers: int) -> tuple[list[int], list[int]]:
    """A text in which one n-gram was followed by these tokens, no longer one twice by any; and that n-gram."""
    gram = list(range(10, 10 + size))
    return [token for at, follower in enumerate(followers) for token in (100 + at, *gram, follower)], gram


THRESHOLDS = [
    # n, followers seen, does the favourite (1) pass lax, does it pass strict
    (1, (1,), False, False),
    (1, (1, 1), True, False),
    (1, (1, 1, 1), True, False),
    (1, (1, 1, 1, 1), True, True),
    (1, (2, 1), False, False),
    (1, (2, 1, 1), True, False),
    (1, (2, 1, 1, 1), True, True),
    (1, (2, 3, 1, 1, 1, 1, 1), True, False),
    (2, (1,), False, False),
    (2, (1, 1), True, False),
    (2, (2, 1), True, False),
    (2, (3, 2, 1), False, False),
    (2, (1, 1, 1), True, True),
    (2, (2, 1, 1), True, True),
    (2, (2, 2, 1, 1, 1), True, False),
    (3, (1,), True, False),
    (3, (2, 1), True, False),
    (3, (3, 2, 1), False, False),
    (3, (1, 1), True, True),
    (3, (2, 1, 1), True, True),
    (4, (1,), True, False),
    (4, (2, 1), True, False),
    (4, (3, 2, 1), False, False),
    (4, (1, 1), True, True),
    (4, (2, 1, 1), True, True),
]


@pytest.mark.parametrize(("size", "followers", "lax", "strict"), THRESHOLDS)
def test_each_threshold_holds_to_the_count(size: int, followers: tuple[int, ...], lax: bool, strict: bool) -> None:
    """Lax samples 2, 2, 1, 1 and percent 66, 50, 50, 50 in the context; strict 4, 3, 2, 2 and 75, 66, 66, 66."""
    text, gram = sightings(size, *followers)
    assert (drafted(NgramCaches(RESOURCES, Options()), [*text, 400, *gram], 1).tree.tokens == (1,)) == lax
    drafter = NgramCaches(RESOURCES, Options())
    finish(drafter, text)
    assert (drafted(drafter, [400, *gram], 1).tree.tokens == (1,)) == strict


def test_the_context_is_believed_before_past_requests_and_these_before_the_corpus() -> None:
    corpus = [[10, 11, 3], [10, 11, 3]]
    drafter = NgramCaches(knowing(corpus), Options(static="corpus"))
    now, gram = sightings(3, 1)
    before, _ = sightings(3, 2, 2)
    assert drafted(drafter, [5, 10, 11], 1).tree.tokens == (3,)
    finish(drafter, [token for token in before if token != 12])  # so 10 11 was followed by 2, twice
    finish(drafter, [token for token in before if token != 12])
    assert drafted(drafter, [5, 10, 11], 1).tree.tokens == (2,)
    context = [token for token in [*now, *now] if token != 12]
    assert drafted(drafter, [*context, 5, 10, 11], 1).tree.tokens == (1,)
    assert gram == [10, 11, 12]


def test_the_corpus_decides_between_equals_and_cannot_save_a_small_share() -> None:
    """Counts are multiplied by 100 times the corpus's, but a winner's share is that of its own count."""
    corpus = [[10, 11, 2]]
    drafter = NgramCaches(knowing(corpus), Options(static="corpus"))
    halves, gram = sightings(2, 2, 2, 1, 1)
    assert drafted(NgramCaches(RESOURCES, Options()), [*halves, 400, *gram], 1).tree.tokens == (1,)
    assert drafted(drafter, [*halves, 400, *gram], 1).tree.tokens == (2,)
    third, gram = sightings(2, 2, 1, 1)
    assert drafted(drafter, [*third, 400, *gram], 1) == NO_DRAFT


@pytest.mark.parametrize(("followers", "expected"), [((3,), ()), ((3, 3), (3,)), ((3, 4), (3,)), ((3, 4, 5), ())])
def test_the_corpus_alone_must_pass_the_lax_bars_of_a_pair(
    followers: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    corpus = [[10, 11, token] for token in followers]
    assert drafted(NgramCaches(knowing(corpus), Options(static="corpus")), [10, 11], 1).tree.tokens == expected


def test_the_corpus_is_asked_after_a_text_of_one_token_as_soon_as_one_is_drafted() -> None:
    corpus = [[10, 11, 3], [10, 11, 3]]
    drafter = NgramCaches(knowing(corpus), Options(static="corpus"))
    for _ in range(8):
        finish(drafter, [10, 11])
    assert drafted(drafter, [10], 2).tree.tokens == (11, 3)


def test_a_drafted_token_is_part_of_the_next_query() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    assert drafted(NgramCaches(RESOURCES, Options()), [*text, 1, 2, 3], 9).tree.tokens == (
        4,
        5,
        6,
        7,
        8,
        1,
        2,
        3,
        4,
    )


class Told:
    """The rule said slowly: counts of every n-gram in dictionaries, as the reference keeps them."""

    def __init__(self, texts: Sequence[Sequence[int]], bars: Bars) -> None:
        self.bars = bars
        self.parts: dict[tuple[int, ...], Counter[int]] = {}
        for text in texts:
            for size in range(1, LONGEST + 1):
                for at in range(size, len(text)):
                    self.parts.setdefault(tuple(text[at - size : at]), Counter())[text[at]] += 1

    def allowed(self, query: Sequence[int], corpus: dict[int, int]) -> set[int]:
        """The tokens that the rule may draft: one, or some of equal weight."""
        for size in range(min(LONGEST, len(query)), 0, -1):
            part = self.parts.get(tuple(query[-size:]), Counter())
            weights = {token: count * (100 * corpus[token] if token in corpus else 1) for token, count in part.items()}
            least, percent = self.bars[size - 1]
            passing = {
                token
                for token, count in part.items()
                if weights[token] == max(weights.values()) and part.total() >= least
                if 100 * count >= percent * part.total()
            }
            if passing:
                return passing
        return set()


letters = st.lists(st.integers(0, 2), max_size=25)


@given(text=letters, past=st.lists(letters, max_size=2), corpus=st.lists(letters, max_size=1), cut=st.integers(0, 9))
def test_it_drafts_what_the_rule_says_when_said_slowly(
    text: list[int],
    past: list[list[int]],
    corpus: list[list[int]],
    cut: int,
) -> None:
    drafter = NgramCaches(knowing(corpus), Options(static="corpus" if any(corpus) else ""))
    for one in past:
        finish(drafter, one)
    live = [*text, *[2] * cut]
    drafted(drafter, live, 3)
    del live[len(text) :]
    draft = drafted(drafter, live, 6)
    context, dynamic, query = Told([live], LAX), Told(past, STRICT), list(live)
    for token in (*draft.tree.tokens, None):
        followers = Told(corpus, LAX).parts.get(tuple(query[-2:]), Counter()) if len(query) > 1 else Counter()
        total = followers.total()
        alone = {one for one, count in followers.items() if total >= 2 and 2 * count >= total}
        allowed = context.allowed(query, followers) or dynamic.allowed(query, followers) or alone
        assert token in allowed if token is not None else len(draft) == 6 or not allowed
        query += [] if token is None else [token]
    assert len(draft.scores) == len(draft.sources) == len(draft)
    assert all(0 < score < 1 for score in draft.scores)


TEXT = list(range(50, 70)) * 2
"""Its second half repeats the first, so that past sightings number two."""


def test_a_request_profits_from_those_before_it() -> None:
    drafter = NgramCaches(RESOURCES, Options())
    assert drafted(drafter, TEXT[:4], 3) == NO_DRAFT
    finish(drafter, TEXT)
    assert drafted(drafter, TEXT[:4], 3).tree.tokens == tuple(TEXT[4:7])


def test_only_what_was_committed_when_the_request_ended_is_learned() -> None:
    """A proposal may be asked for on a text that is only drafted; it leaves nothing behind."""
    drafter = NgramCaches(RESOURCES, Options())
    drafted(drafter, TEXT, 3)
    drafter.release(0)
    assert drafted(drafter, TEXT[:4], 3) == NO_DRAFT
    live = TEXT[:2]
    drafter.observe([Observation(Sight(9, live), NO_DRAFT, Verdict((), (1,)))])
    live += TEXT[2:]
    drafter.release(9)
    assert len(drafted(drafter, TEXT[:4], 3)) == 3


def test_tenants_do_not_see_each_other() -> None:
    drafter = NgramCaches(RESOURCES, Options())
    finish(drafter, TEXT, replace(GREEDY, salt="alice"))
    assert drafted(drafter, TEXT[:4], 3) == NO_DRAFT
    assert drafted(drafter, TEXT[:4], 3, replace(GREEDY, salt="bob")) == NO_DRAFT
    assert len(drafted(drafter, TEXT[:4], 3, replace(GREEDY, salt="alice"))) == 3


def test_a_request_that_must_not_be_stored_leaves_nothing_but_may_read() -> None:
    drafter = NgramCaches(RESOURCES, Options())
    private = replace(GREEDY, store=False)
    finish(drafter, TEXT, private)
    assert drafted(drafter, TEXT[:4], 3) == NO_DRAFT
    finish(drafter, TEXT)
    assert len(drafted(drafter, TEXT[:4], 3, private)) == 3


def test_the_oldest_texts_are_forgotten_beyond_the_room_that_all_tenants_share() -> None:
    drafter = NgramCaches(RESOURCES, Options(remember=100))
    alice, bob = replace(GREEDY, salt="alice"), replace(GREEDY, salt="bob")
    finish(drafter, TEXT, alice)
    finish(drafter, [token + 100 for token in TEXT], alice)
    assert len(drafted(drafter, TEXT[:4], 3, alice)) == 3
    finish(drafter, TEXT, bob)
    assert drafted(drafter, TEXT[:4], 3, alice) == NO_DRAFT
    assert len(drafted(drafter, [token + 100 for token in TEXT[:4]], 3, alice)) == 3
    assert len(drafted(drafter, TEXT[:4], 3, bob)) == 3


def test_of_a_text_without_room_the_end_is_kept() -> None:
    drafter = NgramCaches(RESOURCES, Options(remember=40))
    finish(drafter, [*range(200, 300), *TEXT])
    assert len(drafted(drafter, TEXT[:4], 3)) == 3
    nothing = NgramCaches(RESOURCES, Options(remember=0))
    finish(nothing, TEXT)
    assert drafted(nothing, TEXT[:4], 3) == NO_DRAFT


def test_bad_input_gives_no_draft() -> None:
    drafter = NgramCaches(RESOURCES, Options())
    assert drafted(drafter, [1], 5) == NO_DRAFT
    assert drafted(drafter, [1, 1, 1, 1, 1], 0) == NO_DRAFT
    assert len(drafted(drafter, [1, 1, 1, 1, 1], 100_000)) == 100_000
    drafter.release(77)
    drafter.observe([])


def test_sequences_are_told_apart() -> None:
    drafter = NgramCaches(RESOURCES, Options())
    views = [Sight(0, [1, 2, 3, 4, 1, 2, 3]), Sight(1, [1, 2, 3, 5, 1, 2, 3]), Sight(2, [1, 2, 3])]
    assert [draft.tree.tokens for draft in drafter.propose(views, [1, 1, 1])] == [(4,), (5,), ()]


def test_parameters_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="remember must be at least 0, got -1"):
        parse("lookup-decoding:remember=-1")
    with pytest.raises(UsageError, match=r"nowhere: No such file"):
        NgramCaches(RESOURCES, Options(static=str(tmp_path / "nowhere")))
