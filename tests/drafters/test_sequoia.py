"""Sequoia: the best tree for measured acceptance by rank, and a draft model that fills it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from parlay.drafters.draft_models.sequoia import Sequoia
from parlay.drafters.draft_models.static_trees import RankRecord, best_shape, best_tree
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.sampling.sampler import ranked
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.types import NO_DRAFT, Draft, Observation, Request, Tree, Verdict, trees
from tests.drafters.sight import GREEDY, SAMPLED, MakeRunner, Sight, propose

VOCAB = 12
RANKS = (0.55, 0.2, 0.08, 0.03)


def drafter_on(runner: Any, settings: str = "level_cost=0") -> Sequoia:
    resources = Resources(vocab_size=VOCAB, open_runner=lambda name: runner, default_draft="toy")
    drafter = build(parse(f"sequoia:{settings}"), resources)
    assert isinstance(drafter, Sequoia)
    return drafter


def every_tree(nodes: int) -> Iterator[tuple[int, ...]]:
    """Parents of all ordered trees; ranks are the order among siblings."""
    yield from itertools.product(*(range(-1, node) for node in range(nodes)))


def expected(parents: Sequence[int], acceptance: Sequence[Sequence[float]], levels: int) -> float:
    """1 + sum of the products of acceptance along every path, by definition; 0 for a tree out of bounds."""
    path_prob, depth, siblings = {-1: 1.0}, {-1: 0}, dict.fromkeys(range(-1, len(parents)), 0)
    for node, parent in enumerate(parents):
        rank = siblings[parent]
        siblings[parent] += 1
        depth[node] = depth[parent] + 1
        if depth[node] > levels or rank >= len(acceptance[0]):
            return 0.0
        path_prob[node] = path_prob[parent] * acceptance[depth[parent]][rank]
    return sum(path_prob.values())


@pytest.mark.parametrize("levels", [1, 2, 3, 6])
def test_the_tree_is_the_best_of_all_trees_of_its_size(levels: int) -> None:
    chance = random.Random(levels)
    for _ in range(4):
        acceptance = [sorted((chance.random() / 2 for _ in range(6)), reverse=True) for _ in range(6)]
        for nodes in range(1, 7):
            shape = best_tree(acceptance, nodes, levels)
            assert shape.expected == pytest.approx(
                max(expected(parents, acceptance, levels) for parents in every_tree(nodes))
            )
            assert shape.expected == pytest.approx(expected(shape.parents, acceptance, levels))


def test_the_tree_is_what_the_recurrence_of_the_paper_finds() -> None:
    """T(m, l, b) = max_y T(y, l, b-1) + a_b max_b' T(m-y, l-1, b'), T(1, l, 0) = 1, for ranks alike at every depth."""

    @cache
    def t(nodes: int, levels: int, children: int) -> float:
        if children == 0:
            return 1.0 if nodes == 1 else float("-inf")
        if levels == 0 or children > len(RANKS):
            return float("-inf")
        return max(
            (
                t(first, levels, children - 1) + RANKS[children - 1] * best(nodes - first, levels - 1)
                for first in range(1, nodes)
            ),
            default=float("-inf"),
        )

    @cache
    def best(nodes: int, levels: int) -> float:
        return max(t(nodes, levels, children) for children in range(len(RANKS) + 1))

    for nodes, levels in itertools.product((1, 2, 5, 9, 16, 24), (2, 4, 8)):
        size = max(best(m + 1, levels) for m in range(nodes + 1))  # fewer nodes where more do not fit
        assert best_tree([RANKS] * 8, nodes, levels).expected == pytest.approx(size)


def test_expected_tokens_are_those_of_a_simulation() -> None:
    shape = best_tree([RANKS] * 6, 20, 6)
    ranks = list(zip(shape.parents, shape.ranks, strict=True))
    nodes = {key: node for node, key in enumerate(ranks)}
    chance = random.Random(0)
    tokens = 0
    for _ in range(20_000):
        node: int | None = -1
        while node is not None:
            tokens += 1
            drawn = chance.choices(range(len(RANKS) + 1), [*RANKS, 1 - sum(RANKS)])[0]
            node = nodes.get((node, drawn))
    assert tokens / 20_000 == pytest.approx(shape.expected, rel=0.01)


def test_a_tree_is_closed_under_ancestors_and_earlier_siblings_and_its_beginning_is_the_best_smaller_one() -> None:
    shape = best_tree([RANKS] * 6, 40, 6)
    taken = set()
    for node, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True)):
        assert parent < node
        assert rank == 0 or (parent, rank - 1) in taken
        taken.add((parent, rank))
    smaller = best_tree([RANKS] * 6, 13, 6)
    assert smaller.parents == shape.parents[:13]
    assert list(shape.path_probs) == sorted(shape.path_probs, reverse=True)


def test_where_only_the_first_guess_is_ever_right_the_tree_is_a_chain() -> None:
    shape = best_tree([(0.7, 0.0, 0.0)] * 5, 9, 5)
    assert shape.parents == (-1, 0, 1, 2, 3)
    assert best_tree([(0.0, 0.0)] * 5, 9, 5).parents == ()


def test_levels_that_cost_more_make_shallower_trees() -> None:
    depths = [best_shape([RANKS] * 10, 16, cost).levels for cost in (0.0, 0.1, 0.5, 5.0)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > depths[2] > depths[3] == 1
    best = max(range(1, 11), key=lambda levels: best_tree([RANKS] * 10, 16, levels).expected / (1 + 0.1 * levels))
    assert depths[1] == best


def test_the_record_finds_the_shares_of_ranks_by_depth() -> None:
    """What was seen outweighs the guess; a depth never reached takes after the others; later ranks are no better."""
    record, chance = RankRecord(levels=3, width=3), random.Random(0)
    for _ in range(3000):
        record.learn(0, chance.choices([0, 1, 2, None], [0.8, 0.1, 0.05, 0.05])[0])
        record.learn(1, chance.choices([0, 1, 2, None], [0.2, 0.3, 0.3, 0.2])[0])
    first, second, third = record.acceptance
    assert first == pytest.approx([0.8, 0.1, 0.05], abs=0.07)
    assert second[0] == pytest.approx(0.2, abs=0.08)
    assert second[1] <= second[0]
    assert third[0] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("request_", [GREEDY, SAMPLED])
def test_every_node_is_the_models_guess_of_its_rank(toy_runner: MakeRunner, request_: Request) -> None:
    runner = toy_runner()
    view = Sight(0, [1, 2, 3], request_)
    draft = propose(drafter_on(runner), view, 12)
    shape = best_shape(RankRecord(8, 5).acceptance, 12, 0.0)
    assert draft.tree.parents == shape.parents
    assert draft.scores == shape.scores
    for node, parent in enumerate(shape.parents):
        path = [draft.tree.tokens[above] for above in trees.path_to(draft.tree, parent)]
        best = ranked(runner.logits([1, 2, 3, *path])[None], [view], [path], 5)[0]
        assert draft.tree.tokens[node] == best[shape.ranks[node]]


def test_only_inner_nodes_run_one_forward_for_each_level(toy_runner: MakeRunner) -> None:
    runner = toy_runner()
    draft = propose(drafter_on(runner), Sight(0, [1, 2, 3]), 16)
    assert len(runner.calls) == max(trees.depths(draft.tree))
    inner = {parent for parent in draft.tree.parents if parent >= 0}
    assert len(runner.calls[-1][0].tree) == len(inner)


def test_whatever_was_committed_the_next_draft_is_that_of_a_fresh_drafter(toy_runner: MakeRunner) -> None:
    drafter = drafter_on(toy_runner())
    view = Sight(0, [1, 2, 3])
    for more in ("best", "none", "skip", "rewind", "best"):
        draft = propose(drafter, view, 7)
        assert draft == propose(drafter_on(toy_runner()), replace(view, tokens=list(view.tokens)), 7)
        if more == "rewind":
            del view.tokens[4:]
        else:
            path = [draft.tree.tokens[node] for node in trees.first_path(draft.tree)]
            view.tokens += {"best": [*path, 11], "none": [11], "skip": [5] * 300}[more]


def settle(drafter: Sequoia, view: Sight, rank: int, steps: int) -> Draft:
    """Steps in which the token of one rank is right at the root, and nothing below."""
    for _ in range(steps):
        draft = propose(drafter, view, 6)
        children = [node for node, parent in enumerate(draft.tree.parents) if parent == -1]
        runner: Any = drafter._runner
        best = ranked(runner.logits(view.tokens)[None], [view], [[]], 5)[0]
        committed = (best[rank], 11)
        path = tuple(node for node in children if draft.tree.tokens[node] == committed[0])
        view.tokens += committed if path else committed[:1]
        verdict = Verdict(path, committed if path else committed[:1])
        drafter.observe([Observation(view, draft, verdict)])
        del view.tokens[40:]
    return propose(drafter, view, 6)


def test_the_shape_follows_what_was_right(toy_runner: MakeRunner) -> None:
    """First guesses that are always right at the root make a chain there; second and third ones make it wide."""
    deep = settle(drafter_on(toy_runner()), Sight(0, [1, 2, 3]), 0, 200)
    wide = settle(drafter_on(toy_runner()), Sight(0, [1, 2, 3]), 2, 200)
    assert deep.tree.parents.count(-1) < wide.tree.parents.count(-1)


def test_a_right_token_that_the_tree_did_not_hold_counts_for_its_rank(toy_runner: MakeRunner) -> None:
    """A policy that cuts the tree to one node does not hide that the second guess was right."""
    drafter = drafter_on(toy_runner())
    view = Sight(0, [1, 2, 3])
    before = drafter._record.acceptance[0]
    second = ranked(drafter._runner.logits([1, 2, 3])[None], [view], [[]], 5)[0][1]  # type: ignore[attr-defined]
    cut = trees.first(propose(drafter, view, 6), 1)
    view.tokens.append(second)
    drafter.observe([Observation(view, cut, Verdict((), (second,)))])
    after = drafter._record.acceptance[0]
    assert after[1] > before[1]
    assert after[0] < before[0]
    drafter.observe([Observation(view, NO_DRAFT, Verdict((), (1,)))])
    assert drafter._record.acceptance[0] == after, "a step without a proposal teaches nothing"


def test_its_tree_differs_from_the_best_first_tree_of_the_same_model(toy_runner: MakeRunner) -> None:
    """Best-first follows this text's probabilities; the static tree the record, whatever the text."""
    shapes = {propose(drafter_on(toy_runner()), Sight(0, [start]), 9).tree.parents for start in range(6)}
    assert len(shapes) == 1
    resources = Resources(vocab_size=VOCAB, open_runner=lambda name: toy_runner(), default_draft="toy")
    dynamic = build(parse("draft-model:shape=tree,min_p=0"), resources)
    assert dynamic is not None
    grown = {dynamic.propose([Sight(start, [start])], [9])[0].tree.parents for start in range(6)}
    assert len(grown) > 1


def test_edges(toy_runner: MakeRunner) -> None:
    runner = toy_runner(max_context=10)
    drafter = drafter_on(runner)
    assert propose(drafter, Sight(0, [1]), 0) == NO_DRAFT
    assert [len(propose(drafter, Sight(size, [1] * size), 4)) for size in (5, 8, 10, 12)] == [4, 2, 0, 0]
    drafter.release(5)
    drafter.release(5)
    broken = toy_runner()
    broken.logits = lambda prefix: torch.full((VOCAB,), torch.nan)
    assert propose(drafter_on(broken), Sight(0, [1, 2]), 3) == NO_DRAFT
    assert drafter_on(toy_runner()).propose([], []) == []


def test_what_cannot_work_is_refused(toy_runner: MakeRunner) -> None:
    with pytest.raises(UsageError, match="13 tokens and the target one of 12"):
        drafter_on(toy_runner(vocab=13))
    with pytest.raises(UsageError, match="can't verify trees"):
        drafter_on(toy_runner(trees=False))
    with pytest.raises(UsageError, match="model=NAME_OR_PATH"):
        build(parse("sequoia"), Resources(vocab_size=VOCAB, open_runner=lambda name: pytest.fail("opened")))
    with pytest.raises(UsageError, match="at least 1"):
        parse("sequoia:width=0")
    assert Tree() == NO_DRAFT.tree
