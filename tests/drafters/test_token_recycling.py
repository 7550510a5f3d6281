"""Token recycling: the matrix holds what verified rows preferred, and fills a static tree."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from parlay.drafters.resources import Resources
from parlay.drafters.stores.token_recycling import WIDTH, TokenRecycling, template
from parlay.drafters.stores.token_recycling import TokenRecyclingOptions as Options
from parlay.options import UsageError
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.types import NO_DRAFT, Draft, Needs, Observation, Request, Tree, Verdict, trees
from tests.drafters.sight import GREEDY, Sight, no_runner, wait_for_store_files

VOCAB = 1000
RESOURCES = Resources(vocab_size=VOCAB, open_runner=no_runner)


def propose(drafter: TokenRecycling, token: int, budget: int, request: Request = GREEDY, sequence: int = 5) -> Draft:
    return drafter.propose([Sight(sequence, [0, token], request)], [budget])[0]


def teach(
    drafter: TokenRecycling, rows: Mapping[int, Sequence[int]], request: Request = GREEDY, sequence: int = 0
) -> None:
    """One step per row in which nothing was drafted."""
    for token, choices in rows.items():
        view = Sight(sequence, [0, token, choices[0]], request)
        drafter.observe([Observation(view, NO_DRAFT, Verdict((), (choices[0],)), top_k=(tuple(choices),))])


def branching(token: int) -> list[int]:
    """Eight followers; no two tokens below 100 share one."""
    return [100 + 8 * token + rank for rank in range(WIDTH)]


def test_it_asks_for_eight_choices() -> None:
    assert TokenRecycling(RESOURCES, Options()).needs == Needs(top_k=8)


def test_the_tree_is_filled_from_the_matrix_rank_by_rank() -> None:
    drafter = TokenRecycling(RESOURCES, Options())
    teach(drafter, {1: [2, 3, 4], 2: [5, 6], 3: [7], 5: [1]})
    draft = propose(drafter, 1, 80)
    paths = {tuple(draft.tree.tokens[above] for above in trees.path_to(draft.tree, node)) for node in range(len(draft))}
    assert {(2,), (3,), (4,), (2, 5), (2, 6), (3, 7), (2, 5, 1), (2, 5, 1, 2), (2, 5, 1, 2, 5, 1)} <= paths
    assert trees.depths(draft.tree) == sorted(trees.depths(draft.tree))
    assert draft.scores[0] == max(draft.scores)


def test_the_default_tree_is_the_papers_in_size_and_depth() -> None:
    """80 nodes below the root, 6 deep, 8 at the first level, and only first choices go deepest."""
    shape = template(80)
    tree = Tree(tuple(rank for _, rank in shape), tuple(parent for parent, _ in shape))
    depths = trees.depths(tree)
    assert (len(shape), max(depths), depths.count(1)) == (80, 6, 8)
    assert [tree.tokens[node] for node in trees.path_to(tree, depths.index(6))] == [0] * 6
    families = trees.children(tree)
    for siblings in families:
        assert [tree.tokens[node] for node in siblings] == list(range(len(siblings)))
        sizes = [len(families[node]) for node in siblings]
        assert sizes == sorted(sizes, reverse=True)


def test_trees_grow_by_one_node_with_the_budget() -> None:
    drafter = TokenRecycling(RESOURCES, Options())
    teach(drafter, {token: branching(token) for token in range(110)})
    assert propose(drafter, 1, 0) == NO_DRAFT
    for budget in (1, 2, 9, 80):
        draft = propose(drafter, 0, budget)
        assert len(draft) <= budget
        assert len(draft.scores) == len(draft.sources) == len(draft)
    assert propose(drafter, 1, 1).tree.tokens == (108,)
    assert len(propose(drafter, 1, 1024)) <= 1024


def test_unknown_tokens_are_not_guessed() -> None:
    drafter = TokenRecycling(RESOURCES, Options())
    assert propose(drafter, 1, 80) == NO_DRAFT
    teach(drafter, {1: [2]})
    assert propose(drafter, 1, 80).tree.tokens == (2,)


def test_token_0_is_a_candidate_like_any_other() -> None:
    drafter = TokenRecycling(RESOURCES, Options())
    teach(drafter, {0: [0, 1]})
    assert set(propose(drafter, 0, 4).tree.tokens) == {0, 1}


def test_rejected_rows_teach_too_and_the_last_row_of_a_token_replaces_the_one_before() -> None:
    drafter = TokenRecycling(RESOURCES, Options())
    draft = Draft(Tree((2, 3, 4), (-1, -1, 0)), sources=("token-recycling",) * 3)
    choices = ((2, 3), (4, 9), (6, 7), (8, 1))
    drafter.observe([Observation(Sight(0, [0, 1, 2, 4, 8]), draft, Verdict((0, 2), (2, 4, 8)), top_k=choices)])
    for token, followers in {1: (2, 3), 2: (4, 9), 3: (6, 7), 4: (8, 1)}.items():
        assert propose(drafter, token, 80).tree.tokens[:2] == followers
    teach(drafter, {3: [5]})
    assert propose(drafter, 3, 1).tree.tokens == (5,)


def test_where_a_token_was_verified_twice_the_row_of_the_true_text_stands() -> None:
    drafter = TokenRecycling(RESOURCES, Options())
    draft = Draft(Tree((2, 3, 2), (-1, -1, 1)), sources=("token-recycling",) * 3)
    choices = ((2, 3), (10,), (11,), (12,))
    drafter.observe([Observation(Sight(0, [0, 1, 2, 10]), draft, Verdict((0,), (2, 10)), top_k=choices)])
    assert propose(drafter, 2, 1).tree.tokens == (10,)


def test_a_step_that_a_stop_cut_short_teaches_no_wrong_root() -> None:
    """Two of three sampled tokens were committed: the root's place can't be read off the end of the text."""
    drafter = TokenRecycling(RESOURCES, Options())
    draft = Draft(Tree((2, 3), (-1, 0)), sources=("token-recycling",) * 2)
    view = Sight(0, [0, 1, 2, 3])
    drafter.observe([Observation(view, draft, Verdict((0, 1), (2, 3, 4)), top_k=((2,), (3,), (4,)))])
    assert propose(drafter, 0, 9) == NO_DRAFT
    assert propose(drafter, 2, 1).tree.tokens == (3,)


def test_rows_without_choices_change_nothing() -> None:
    drafter = TokenRecycling(RESOURCES, Options())
    teach(drafter, {1: [2]})
    drafter.observe([Observation(Sight(0, [0, 1, 7]), NO_DRAFT, Verdict((), (7,)), top_k=((),))])
    drafter.observe([Observation(Sight(0, [0, 1, 7]), NO_DRAFT, Verdict((), (7,)))])
    assert propose(drafter, 1, 1).tree.tokens == (2,)


def test_nothing_is_drafted_below_a_stop_token() -> None:
    drafter = TokenRecycling(RESOURCES, Options())
    teach(drafter, {1: [2], 2: [3]})
    assert propose(drafter, 1, 9, replace(GREEDY, stop_ids=frozenset({2}))).tree.tokens == (2,)


def test_tenants_do_not_share() -> None:
    drafter = TokenRecycling(RESOURCES, Options())
    teach(drafter, {1: [2]}, replace(GREEDY, salt="a"))
    assert propose(drafter, 1, 1) == NO_DRAFT
    assert propose(drafter, 1, 1, replace(GREEDY, salt="a")).tree.tokens == (2,)


def test_the_tenant_without_requests_for_longest_is_forgotten() -> None:
    drafter = TokenRecycling(RESOURCES, Options(tenants=2))
    for salt in ("a", "b", "a", "c"):
        teach(drafter, {1: [2]}, replace(GREEDY, salt=salt))
    known = [bool(len(propose(drafter, 1, 1, replace(GREEDY, salt=salt)))) for salt in ("a", "b", "c")]
    assert known == [True, False, True]


def test_a_request_that_opts_out_reads_the_store_and_learns_for_itself_alone() -> None:
    drafter = TokenRecycling(RESOURCES, Options())
    private = replace(GREEDY, store=False)
    teach(drafter, {1: [2]})
    teach(drafter, {1: [3], 4: [5]}, private, sequence=8)
    assert propose(drafter, 1, 1).tree.tokens == (2,)
    assert propose(drafter, 4, 1) == NO_DRAFT
    assert propose(drafter, 1, 1, private, sequence=8).tree.tokens == (3,)
    assert propose(drafter, 1, 1, private, sequence=9).tree.tokens == (2,)
    drafter.release(8)
    assert propose(drafter, 4, 1, private, sequence=8) == NO_DRAFT


def test_the_matrix_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "choices.store"
    first = TokenRecycling(RESOURCES, Options(store=str(path), save_every=2))
    teach(first, {1: [2, 0, 4]}, sequence=1)
    first.release(1)
    assert not path.exists()
    teach(first, {VOCAB - 1: [VOCAB - 1]}, replace(GREEDY, salt="a"), sequence=2)
    first.release(2)
    first.release(2)
    wait_for_store_files()
    second = TokenRecycling(RESOURCES, Options(store=str(path)))
    for salt, token in (("", 1), ("a", VOCAB - 1), ("a", 1)):
        request = replace(GREEDY, salt=salt)
        assert propose(second, token, 80, request) == propose(first, token, 80, request)
    with pytest.raises(UsageError, match="vocabulary of 1000, this target has 999"):
        TokenRecycling(replace(RESOURCES, vocab_size=999), Options(store=str(path)))
    with pytest.raises(UsageError, match="holds choices, not outputs"):
        build(parse(f"suffix-decoding:store={path}"), RESOURCES)


def test_a_write_that_fails_costs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = TokenRecycling(RESOURCES, Options(store=str(tmp_path / "choices.store"), save_every=1))
    teach(drafter, {1: [2]})

    def fail(source: str, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with caplog.at_level(logging.WARNING):
        drafter.release(0)
        wait_for_store_files()
    assert "disk full" in caplog.text


@pytest.mark.parametrize("wrong", ["tenants=0", "save_every=0", "k=-1"])
def test_parameters_out_of_range_are_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong.partition("=")[0]):
        parse(f"token-recycling:{wrong}")


def test_a_file_of_more_tenants_gives_those_that_were_used_last(tmp_path: Path) -> None:
    path = tmp_path / "choices.store"
    first = TokenRecycling(RESOURCES, Options(store=str(path), save_every=100))
    tenants = [replace(GREEDY, salt=name) for name in "abc"]
    for number, tenant in enumerate(tenants):
        teach(first, {1: [2 + number]}, tenant)
        first.release(0)
    first._saving.save()
    second = TokenRecycling(RESOURCES, Options(store=str(path), tenants=2))
    assert [len(propose(second, 1, 4, tenant)) for tenant in tenants] == [0, 1, 1]
