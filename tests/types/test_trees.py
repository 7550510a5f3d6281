"""Trees: what building, cutting and merging promise, for any tree."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from parlay.types import NO_DRAFT, Draft, Tree, trees


@st.composite
def tree_of(draw: st.DrawFn, vocab: int = 5) -> Tree:
    size = draw(st.integers(0, 16))
    tokens = draw(st.lists(st.integers(0, vocab - 1), min_size=size, max_size=size))
    return Tree(tuple(tokens), tuple(draw(st.integers(-1, node - 1)) for node in range(size)))


@st.composite
def drafts(draw: st.DrawFn, merged: bool = False) -> Draft:
    """Any draft; ``merged`` ones have no equal siblings and no probes, as drafters of fixed guesses make them."""
    tree = draw(tree_of())
    if merged:
        tree = trees.merge([Draft(tree, sources=("",) * len(tree)), trees.chain([0], "")]).tree
    size = len(tree)
    unit = st.floats(0, 1, allow_nan=False, width=16)
    return Draft(
        tree,
        sources=tuple(f"source {node}" for node in range(size)),
        scores=tuple(draw(st.lists(unit, min_size=size, max_size=size))) if draw(st.booleans()) else (),
        probs=torch.arange(3.0 * size).view(size, 3) if draw(st.booleans()) else None,
        probes=0 if merged else draw(st.integers(0, size)),
    )


def spell(tree: Tree, node: int) -> tuple[int, ...]:
    return tuple(tree.tokens[above] for above in trees.path_to(tree, node))


def texts(tree: Tree) -> set[tuple[int, ...]]:
    """Every text that a walk down the tree can spell."""
    return {spell(tree, node) for node in range(len(tree))}


@given(tree_of())
def test_depths_paths_and_children_tell_the_same_story(tree: Tree) -> None:
    children = trees.children(tree)
    assert trees.path_to(tree, -1) == ()
    assert sorted(node for siblings in children for node in siblings) == list(range(len(tree)))
    for node, (parent, depth) in enumerate(zip(tree.parents, trees.depths(tree), strict=True)):
        path = trees.path_to(tree, node)
        assert len(path) == depth
        assert path == (*trees.path_to(tree, parent), node)
        assert node in children[parent]
        assert children[parent] == sorted(children[parent])


@given(tree_of())
def test_what_nodes_of_a_path_have_is_told_in_the_order_of_the_path(tree: Tree) -> None:
    for node in range(-1, len(tree)):
        path = trees.path_to(tree, node)
        assert trees.along(tree.parents, path) == tuple(tree.parents[above] for above in path)


@given(tree_of())
def test_a_node_sees_exactly_its_path(tree: Tree) -> None:
    rows = trees.visibility(tree)
    for node, row in enumerate(rows):
        assert tuple(other for other, seen in enumerate(row) if seen) == trees.path_to(tree, node)


@given(tree_of())
def test_leaf_paths_end_in_each_leaf_once_and_cover_the_tree(tree: Tree) -> None:
    paths = trees.leaf_paths(tree)
    children = trees.children(tree)
    assert [path[-1] for path in paths] == [node for node in range(len(tree)) if not children[node]]
    assert {node for path in paths for node in path} == set(range(len(tree)))


@given(st.lists(st.integers(0, 9), max_size=6))
def test_a_chain_has_one_path(tokens: list[int]) -> None:
    draft = trees.chain(tokens, "me", [0.5] * len(tokens))
    assert trees.is_chain(draft.tree)
    assert trees.chain_tree(tokens) == draft.tree
    assert trees.depths(draft.tree) == list(range(1, len(tokens) + 1))
    assert spell(draft.tree, len(draft) - 1) == tuple(tokens)
    assert (draft.sources, draft.scores) == (("me",) * len(tokens), (0.5,) * len(tokens))


@given(tree_of())
def test_only_trees_with_one_leaf_that_grow_downwards_are_chains(tree: Tree) -> None:
    assert trees.is_chain(tree) == (len(trees.leaf_paths(tree)) <= 1)


@given(drafts(), st.data())
def test_a_subtree_keeps_what_belongs_to_its_nodes(draft: Draft, data: st.DataObject) -> None:
    wanted = data.draw(st.sets(st.sampled_from(range(len(draft))))) if len(draft) else set()
    nodes = sorted({node for one in wanted for node in trees.path_to(draft.tree, one)})
    part = trees.subtree(draft, nodes)
    assert [spell(part.tree, place) for place in range(len(part))] == [spell(draft.tree, node) for node in nodes]
    assert part.sources == tuple(draft.sources[node] for node in nodes)
    assert part.probes == sum(node >= len(draft) - draft.probes for node in nodes)
    if draft.scores:
        assert part.scores == tuple(draft.scores[node] for node in nodes)
    if draft.probs is not None and nodes:
        assert part.probs is not None
        assert torch.equal(part.probs, draft.probs[nodes])


@given(drafts(), st.integers(0, 20))
def test_first_keeps_a_prefix_of_the_nodes_and_the_probes_that_hang_on_it(draft: Draft, budget: int) -> None:
    part = trees.first(draft, budget)
    real = len(draft) - draft.probes
    count = min(budget, real)
    assert part.tree.tokens[:count] == draft.tree.tokens[:count]
    assert part.tree.parents[:count] == draft.tree.parents[:count]
    allowed = {*range(count), *range(real, len(draft))}
    paths = [trees.path_to(draft.tree, probe) for probe in range(real, len(draft))]
    stay = [spell(draft.tree, path[-1]) for path in paths if allowed.issuperset(path)]
    assert [spell(part.tree, node) for node in range(count, len(part))] == stay
    assert part.probes == len(stay)


@given(drafts(), st.frozensets(st.integers(0, 4)))
def test_an_ended_draft_has_every_node_above_which_no_text_ends(draft: Draft, stops: frozenset[int]) -> None:
    part = trees.ended(draft, stops)
    real = len(draft) - draft.probes
    ends = {node for node in range(real) if draft.tree.tokens[node] in stops}
    stay = [node for node in range(len(draft)) if ends.isdisjoint(trees.path_to(draft.tree, node)[:-1])]
    assert part.tree == trees.subtree(draft, stay).tree
    assert part.probes == sum(node >= real for node in stay)


@given(drafts())
def test_without_probes_a_draft_is_its_other_nodes(draft: Draft) -> None:
    part = trees.without_probes(draft)
    real = len(draft) - draft.probes
    assert part.tree == Tree(draft.tree.tokens[:real], draft.tree.parents[:real])
    assert part.probes == 0


@given(drafts())
@example(Draft(Tree((1, 2), (-1, -1)), sources=("a", "b"), probes=2))
def test_the_best_chain_is_the_path_of_highest_expected_length(draft: Draft) -> None:
    best = trees.best_chain(draft)
    assert trees.is_chain(best.tree)
    if trees.is_chain(draft.tree):
        assert best is draft
        return

    def expected_length(path: tuple[int, ...]) -> float:
        total, reach = 0.0, 1.0
        for node in path:
            reach *= draft.scores[node] if draft.scores else 1.0
            total += reach
        return total

    real = [trees.path_to(draft.tree, node) for node in range(len(draft) - draft.probes)]
    assert best.probes == 0
    if real:
        nodes = tuple(draft.sources.index(source) for source in best.sources)
        assert nodes in real
        assert expected_length(nodes) == max(expected_length(path) for path in real)
    else:
        assert best == NO_DRAFT


@given(st.lists(drafts(merged=True).map(lambda draft: replace(draft, probs=None)), max_size=4))
def test_merging_keeps_every_text_once_and_credits_the_first_to_propose_it(parts: list[Draft]) -> None:
    merged = trees.merge(parts)
    spelt = [spell(merged.tree, node) for node in range(len(merged))]
    assert len(set(spelt)) == len(spelt)
    assert set(spelt) == set().union(*(texts(part.tree) for part in parts))
    assert all(parent < node for node, parent in enumerate(merged.tree.parents))
    for text, source in zip(spelt, merged.sources, strict=True):
        owner = next(part for part in parts if text in texts(part.tree))
        assert source == owner.sources[[spell(owner.tree, node) for node in range(len(owner))].index(text)]


def test_merging_refuses_draws_and_probes() -> None:
    plain = trees.chain([1], "a")
    for other in (replace(plain, kind="iid"), replace(plain, probes=1)):
        with pytest.raises(ValueError, match="can be merged"):
            trees.merge([plain, other])


@given(drafts(), st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_a_lengthened_chain_goes_on_after_its_last_node_and_keeps_its_probes(draft: Draft, tokens: list[int]) -> None:
    if draft.kind != "point" or not trees.is_chain(trees.without_probes(draft).tree):
        return
    longer = trees.lengthened(draft, tokens, "more")
    end = len(draft) - draft.probes
    body = trees.without_probes(longer)
    assert body.tree == trees.chain_tree([*draft.tree.tokens[:end], *tokens])
    assert body.sources == (*draft.sources[:end], *("more",) * len(tokens))
    assert len(body.scores) in (0, len(body))
    assert longer.probes == draft.probes
    probes = [spell(longer.tree, node) for node in range(len(body), len(longer))]
    assert probes == [spell(draft.tree, node) for node in range(end, len(draft))]
