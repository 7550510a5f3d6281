"""What a constraint does to drafts before the forward, and what policies hear of it."""

from __future__ import annotations

from dataclasses import replace

import torch

from parlay.engine.constrained import GRAMMAR, drafters_part, legal, with_forced
from parlay.testing.toy_constraint import ToyConstraint, ToyGrammar
from parlay.types import NO_DRAFT, Draft, Tree, trees

TOOL = ToyGrammar(16, length=40, seed=7)


def allowed(count: int) -> list[int]:
    output: list[int] = []
    while len(output) < count:
        output.append(TOOL.following(output)[0])
    return output


def forbidden(output: list[int]) -> int:
    return next(token for token in range(16) if token not in TOOL.following(output))


def test_a_forbidden_node_goes_with_all_that_hangs_on_it() -> None:
    good = allowed(3)
    bad = forbidden(good[:1])
    tree = Tree((*good, bad, good[0], bad, 3), (-1, 0, 1, 0, 3, -1, 4))
    draft = Draft(tree, sources=tuple("abcdefg"), scores=(0.5,) * 7, probes=1)
    kept = legal(
        replace(draft, tree=replace(tree, tokens=(*good, bad, good[0], forbidden([]), 3))), ToyConstraint(TOOL)
    )
    assert kept.tree == trees.chain_tree(good)
    assert kept.sources == ("a", "b", "c")
    assert kept.probes == 0


def test_a_drawn_draft_is_left_whole() -> None:
    drawn = Draft(trees.chain_tree([forbidden([]), 1]), kind="iid", sources=("a", "a"), probs=torch.ones(2, 16) / 16)
    assert legal(drawn, ToyConstraint(TOOL)) is drawn
    assert with_forced(drawn, [5, 6, 7], "iid", 16) is drawn


def test_forced_tokens_go_on_where_the_drafter_ends() -> None:
    own = trees.chain([5, 6], "me", (0.5, 0.5))
    both = with_forced(own, [5, 6, 7, 8], "point", 16)
    assert both.tree == trees.chain_tree([5, 6, 7, 8])
    assert both.sources == ("me", "me", GRAMMAR, GRAMMAR)
    assert with_forced(both, [5, 6], "point", 16) is both
    assert with_forced(NO_DRAFT, [], "point", 16) is NO_DRAFT


def test_rules_that_take_draws_alone_get_forced_tokens_as_sure_draws() -> None:
    drawn = Draft(trees.chain_tree([5]), kind="iid", sources=("me",), scores=(0.5,), probs=torch.ones(1, 16) / 16)
    for draft in (drawn, NO_DRAFT):
        longer = with_forced(draft, [5, 6], "iid", 16)
        assert longer.kind == "iid"
        assert longer.tree == trees.chain_tree([5, 6])
        assert longer.probs is not None
        assert longer.probs.shape == (2, 16)
        assert longer.probs[-1].tolist() == [float(token == 6) for token in range(16)]


def test_policies_hear_nothing_of_forced_nodes() -> None:
    own = trees.chain([5, 6], "me")
    assert drafters_part(own) is own
    assert drafters_part(with_forced(NO_DRAFT, [5, 6], "point", 16)) == NO_DRAFT
    assert drafters_part(with_forced(own, [5, 6, 7], "point", 16)) is None
    probes = Draft(Tree((1, 2), (-1, 0)), sources=("me", "me"), scores=(0.0, 0.0), probes=2)
    assert drafters_part(with_forced(probes, [5, 6], "point", 16)) == probes
