"""The rules that promise a distribution keep it exactly: every draft, coin and draw is enumerated in rationals.

Vocabulary of three, drafts two levels deep; target's and drafter's distributions hang on the whole path.
Compared is the distribution of the first three tokens, where a step that commits fewer is followed by plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest

from parlay.sampling.rules.block import BlockVerification
from parlay.sampling.rules.distribution_rule import DistributionRule
from parlay.sampling.rules.k_seq import KSeq, any_of, ratio
from parlay.sampling.rules.rejection import Rejection, WithoutReplacement, one_by_one
from parlay.sampling.rules.rule_input import descend, residual
from parlay.types import Tree, Verdict, trees
from tests.sampling.enumeration import (
    Explorer,
    Grow,
    Grown,
    Model,
    given,
    iid,
    outcomes,
    plain_distribution,
    text_distribution,
    vector,
    without_replacement,
)

LENGTH = 3


def models(seed: int, zeros: bool = False) -> tuple[Model, Model]:
    return Model(seed, zeros=zeros), Model(1000 + seed, zeros=zeros)


def distribution_under(
    rule: DistributionRule, grow: Grow, target: Model, drafter: Model
) -> tuple[dict[tuple[int, ...], Fraction], Fraction]:
    return text_distribution(
        lambda explorer: rule.verdict(given(grow(explorer, drafter), target, explorer)), target, LENGTH
    )


def keeps_the_distribution(
    rule: DistributionRule, grow: Grow, seeds: Sequence[int] = range(3), kinds: Sequence[bool] = (False, True)
) -> bool:
    """Of models whose distributions give every token a chance, and of such that do not."""
    pairs = [models(seed, zeros) for seed in seeds for zeros in kinds]
    return all(distribution_under(rule, grow, *pair)[0] == plain_distribution(pair[0], LENGTH) for pair in pairs)


DRAFTS: list[tuple[DistributionRule, Callable[..., Grown], tuple[int, ...], int]] = [
    (Rejection(), iid, (1, 1), 9),
    (Rejection(), iid, (1, 1), 1),
    (Rejection(), iid, (2, 1), 9),
    (Rejection(), iid, (2, 2), 4),
    (WithoutReplacement(), without_replacement, (2, 1), 9),
    (WithoutReplacement(), without_replacement, (2, 2), 3),
    (WithoutReplacement(), without_replacement, (3, 2), 5),
    (KSeq(), iid, (1, 1), 9),
    (BlockVerification(), iid, (1, 1), 9),
    (BlockVerification(), iid, (1, 1, 1), 9),
    (BlockVerification(), iid, (1, 1, 1), 2),
]


@pytest.mark.parametrize(("rule", "grow", "widths", "most"), DRAFTS)
def test_the_distribution_is_the_targets(
    rule: DistributionRule, grow: Callable[..., Grown], widths: tuple[int, ...], most: int
) -> None:
    """Whole drafts and drafts cut to their first nodes; three siblings of three tokens use the drafter's up."""
    assert keeps_the_distribution(rule, partial(grow, widths=widths, most=most))


@pytest.mark.parametrize("most", [3, 9])
def test_the_distribution_of_k_seq_is_the_targets(most: int) -> None:
    """Two chains, whole and cut to where only one has a second token: k is recomputed of those that are left."""
    assert keeps_the_distribution(KSeq(), partial(iid, widths=(2, 1), most=most), [1], [most == 9])


def stopping(explorer: Explorer, drafter: Model) -> Grown:
    """A chain that ends after token 0, which was drawn and so stays."""
    nodes: Grown = []
    text: tuple[int, ...] = ()
    while len(nodes) < 2 and (not text or text[-1] != 0):
        token = explorer.draw(drafter(text), len(text))
        nodes.append((token, len(nodes) - 1, drafter(text)))
        text = (*text, token)
    return nodes


@pytest.mark.parametrize("rule", [Rejection(), BlockVerification(), KSeq()])
def test_a_chain_may_end_by_what_was_drawn_so_far(rule: DistributionRule) -> None:
    assert keeps_the_distribution(rule, stopping)


def test_how_many_siblings_there_are_may_hang_on_the_earlier_ones() -> None:
    """What stochastic beams do: whether another sibling stands in the tree tells nothing of which one it is."""

    def grow(explorer: Explorer, drafter: Model) -> Grown:
        nodes = without_replacement(explorer, drafter, (1,))
        if nodes[0][0] != 2:
            left = drafter(()).copy()
            left[nodes[0][0]] = Fraction(0)
            if left.any():
                nodes.append((explorer.draw(left, 0), -1, drafter(())))
        return nodes

    assert keeps_the_distribution(WithoutReplacement(), grow)


def test_siblings_may_come_of_different_distributions() -> None:
    """Merged trees of several draft models: each sibling is judged by the distribution it was drawn from."""

    def grow(explorer: Explorer, drafter: Model) -> Grown:
        other = replace(drafter, seed=drafter.seed + 7, known={})
        one, two = (each(()) for each in (drafter, other))
        first, second = explorer.draw(one, 0), explorer.draw(two, 0)
        below = explorer.draw(other((second,)), 1)
        return [(first, -1, one), (second, -1, two), (below, 1, other((second,)))]

    assert keeps_the_distribution(Rejection(), grow)


def test_removing_nodes_by_what_was_drawn_changes_the_distribution() -> None:
    """Why drawn drafts are never trimmed by score: here a token is left out for being token 0."""

    def grow(explorer: Explorer, drafter: Model) -> Grown:
        return [node for node in iid(explorer, drafter, (1,)) if node[0] != 0]

    assert not keeps_the_distribution(Rejection(), grow, [1])
    assert not keeps_the_distribution(BlockVerification(), grow, [1])


def test_best_guesses_with_softmax_probabilities_change_the_distribution() -> None:
    """The trap of dynamic trees: fixed guesses were not drawn from the softmax; their distribution is one-hot."""

    def grow(explorer: Explorer, drafter: Model, honest: bool) -> Grown:
        distribution = drafter(())
        best = sorted(range(3), key=lambda token: -distribution[token])[:2]
        return [
            (token, -1, vector([int(token == other) for other in range(3)]) if honest else distribution)
            for token in best
        ]

    assert not keeps_the_distribution(Rejection(), partial(grow, honest=False), [1])
    assert not keeps_the_distribution(WithoutReplacement(), partial(grow, honest=False), [1])
    assert keeps_the_distribution(Rejection(), partial(grow, honest=True))


def test_block_verification_does_not_stop_at_the_first_failure() -> None:
    """A prefix whose own coin fails is accepted all the same as part of a longer one whose coin holds."""

    class Scripted:
        def coin(self, probability: object, level: int, number: int) -> bool:
            return level == 1

        def draw(self, weights: object, level: int) -> int:
            return 2

    target, drafter = models(3)
    nodes = [(0, -1, drafter(())), (1, 0, drafter((0,)))]
    judged = replace(given(nodes, target, Explorer([])), rng=Scripted())
    assert BlockVerification().verdict(judged) == Verdict((0, 1), (0, 1, 2))


@pytest.mark.parametrize("seed", range(12))
def test_block_verification_accepts_no_fewer_tokens_than_rejection(seed: int) -> None:
    target, drafter = models(seed)
    grow = partial(iid, widths=(1, 1))
    assert (
        distribution_under(BlockVerification(), grow, target, drafter)[1]
        >= distribution_under(Rejection(), grow, target, drafter)[1]
    )


def test_block_verification_accepts_more_where_acceptance_varies() -> None:
    gains = []
    for seed in range(5):
        by_block, by_token = (
            distribution_under(rule, partial(iid, widths=(1, 1)), *models(seed))
            for rule in (BlockVerification(), Rejection())
        )
        gains.append(by_block[1] - by_token[1])
    assert max(gains) > 0


@pytest.mark.parametrize("seed", range(4))
def test_block_verification_of_one_token_is_rejection(seed: int) -> None:
    target, drafter = models(seed)
    grow = partial(iid, widths=(1,))
    assert distribution_under(BlockVerification(), grow, target, drafter) == distribution_under(
        Rejection(), grow, target, drafter
    )


@pytest.mark.parametrize("seed", range(4))
def test_k_seq_with_one_draft_is_rejection(seed: int) -> None:
    target, drafter = models(seed)
    assert ratio(target(()), drafter(()), 1) == 1
    grow = partial(iid, widths=(1, 1))
    by_k_seq, by_rejection = (
        list(outcomes(partial(run, rule, grow, target, drafter))) for rule in (KSeq(), Rejection())
    )
    assert by_k_seq == by_rejection


def run(rule: DistributionRule, grow: Grow, target: Model, drafter: Model, explorer: Explorer) -> Verdict:
    return rule.verdict(given(grow(explorer, drafter), target, explorer))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_ratio_of_k_seq_solves_its_equation(count: int) -> None:
    for seed in range(5):
        target, drafter = (model(()) for model in models(seed))
        r = ratio(target, drafter, count)
        beta = sum(min(q, p / r) for p, q in zip(target, drafter, strict=True))
        assert 1 <= r <= count
        assert 0 <= r * beta - (1 - (1 - beta) ** count) < Fraction(1, 10**5)


def test_rejection_accepts_as_often_as_the_distributions_overlap() -> None:
    """Acceptance of one draw is sum(min(p, q)), and of a chain without context the sum of its powers."""
    target, drafter = models(2)
    overlap = sum(min(p, q) for p, q in zip(target(()), drafter(()), strict=True))
    assert distribution_under(Rejection(), partial(iid, widths=(1,)), target, drafter)[1] == overlap


def test_equal_draws_are_one_place() -> None:
    """Independent siblings may be equal: what hangs on either is a candidate below."""
    one, distribution = vector([1, 0, 0]), vector([Fraction(1, 2), Fraction(1, 2), 0])
    nodes = [(0, -1, one), (0, -1, one), (1, 1, distribution)]
    judged = replace(given(nodes, Model(0), Explorer([])), target=lambda node: one if node == -1 else distribution)
    verdict = descend(judged, one_by_one)
    assert verdict.path == (1, 2)
    assert verdict.sampled[:2] == (0, 1)


def test_equal_draws_count_each_for_themselves() -> None:
    """Two equal drafts have two chances under K-SEQ; under rejection in turn the second has none."""
    target, drafted = vector([Fraction(1, 4), Fraction(3, 4)]), vector([Fraction(1, 2), Fraction(1, 2)])
    twice = [(0, drafted), (0, drafted)]

    class Unlucky:
        def __init__(self) -> None:
            self.asked: list[Fraction] = []

        def coin(self, probability: Fraction) -> bool:
            self.asked.append(probability)
            return False

        def draw(self, weights: object) -> int:
            return 1

    for choose, chances in ((one_by_one, [Fraction(1, 2), 0]), (any_of, None)):
        rng = Unlucky()
        assert choose(target, twice, rng) == 1  # type: ignore[arg-type]
        assert len(rng.asked) == 2
        assert rng.asked == (chances or [rng.asked[0]] * 2)


def test_distributions_that_are_equal_up_to_rounding_leave_the_target() -> None:
    distribution = vector([Fraction(1, 3), Fraction(2, 3)])
    assert list(residual(distribution, distribution)) == list(distribution)


def test_the_first_path_of_a_drawn_tree_keeps_the_distribution() -> None:
    """What is left of it on a runner that takes chains only; choosing the likeliest path would not."""

    def grow(explorer: Explorer, drafter: Model, keep: Callable[[Tree, Grown], Sequence[int]]) -> Grown:
        nodes = iid(explorer, drafter, (2, 1))
        tree = Tree(tuple(token for token, _, _ in nodes), tuple(parent for _, parent, _ in nodes))
        kept = list(keep(tree, nodes))
        return [
            (nodes[node][0], kept.index(nodes[node][1]) if place else -1, nodes[node][2])
            for place, node in enumerate(kept)
        ]

    def likeliest(tree: Tree, nodes: Grown) -> Sequence[int]:
        return trees.path_to(
            tree, max((2, 3), key=lambda leaf: nodes[tree.parents[leaf]][2][nodes[tree.parents[leaf]][0]])
        )

    assert keeps_the_distribution(Rejection(), partial(grow, keep=lambda tree, nodes: trees.first_path(tree)))
    assert not keeps_the_distribution(Rejection(), partial(grow, keep=likeliest), [1])
