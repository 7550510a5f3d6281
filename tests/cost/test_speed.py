"""Predicted speeds are the papers' formulas, and the crossovers are where brute force finds them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from parlay.cost.overheads import Overheads
from parlay.cost.roofline import ForwardShape, Machine, ModelShape
from parlay.cost.speed import DraftPlan, Setting, best_tree, children, choose, crossover, predict, tokens_beside
from tests.cost.test_roofline import MACHINE, SHAPE

SMALL = replace(SHAPE, num_layers=1, hidden_size=64, intermediate_size=128)


def setting(batch: int = 1, context: int = 256, shape: ModelShape = SHAPE, machine: Machine = MACHINE) -> Setting:
    return Setting(machine, shape, batch, context)


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("nodes", [0, 1, 4, 16])
def test_a_chain_commits_the_geometric_sum(chance: float, nodes: int) -> None:
    tree = best_tree((chance,), nodes)
    assert tree.tokens == pytest.approx((1 - chance ** (nodes + 1)) / (1 - chance))
    assert (tree.depth, tree.leaves) == (nodes, 1)


def test_a_sure_chain_commits_all_of_it() -> None:
    assert best_tree((1.0,), 8).tokens == 9


def test_children_are_those_of_the_best_tree() -> None:
    """The chances of all paths from the root add up to the tokens that the tree commits."""
    ranks = (0.5, 0.25, 0.15)
    for nodes in range(20):
        tree, reach = children(ranks, nodes), {0: 1.0}
        for node, places in enumerate(tree):
            reach |= {place: reach[node] * chance for place, chance in zip(places, ranks, strict=False) if place}
        assert len(reach) == nodes + 1
        assert sum(reach.values()) == pytest.approx(best_tree(ranks, nodes).tokens)
    assert children((0.9,), 2) == [[1, 0], [2, 0], [0, 0]]


def test_the_best_tree_is_that_of_brute_force() -> None:
    """Over all trees of five nodes with up to three children each, for chances by rank."""
    ranks = (0.5, 0.25, 0.15)
    paths = [path for depth in range(1, 6) for path in itertools.product(range(3), repeat=depth)]

    def reach(path: tuple[int, ...]) -> float:
        chance = 1.0
        for rank in path:
            chance *= ranks[rank]
        return chance

    best = 0.0
    grown: set[frozenset[tuple[int, ...]]] = {frozenset()}
    for _ in range(5):  # every closed set of paths, node by node
        grown = {
            chosen | {path}
            for chosen in grown
            for path in paths
            if path not in chosen and (len(path) == 1 or path[:-1] in chosen)
        }
    best = max(sum(map(reach, chosen)) for chosen in grown)
    assert best_tree(ranks, 5).tokens == pytest.approx(1 + best)


def test_levels_and_leaves_of_a_tree() -> None:
    """0.5 and 0.4, then 0.25 and 0.2 below the first, 0.2 below the second."""
    tree = best_tree((0.5, 0.4), 5)
    assert (tree.depth, tree.leaves) == (2, 3)
    assert tree.tokens == pytest.approx(1 + 0.5 + 0.4 + 0.25 + 0.2 + 0.2)
    assert best_tree((0.5, 0.4), 3).leaves == 2


@pytest.mark.parametrize("ranks", [(), (-0.1,), (0.7, 0.4)])
def test_chances_that_are_none_are_refused(ranks: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="acceptance"):
        best_tree(ranks, 2)


def test_speed_is_tokens_over_verify_drafting_and_the_engine() -> None:
    engine = Overheads(step=2e-4, sequence=1e-5, drafted=2e-5, node=1e-6, level=3e-4, level_sequence=4e-5)
    machine = replace(MACHINE, engine=engine)
    here = setting(batch=4, machine=machine)
    speed = predict(here, DraftPlan(name="drafts", nodes=3, ranks=(0.6,), drafter=SMALL, adapts=False))
    verify = machine.forward(SHAPE, ForwardShape(batch=4, rows=4, context=256))
    draft = 3 * (machine.forward(SMALL, ForwardShape(batch=4, context=256)) + 3e-4 + 4 * 4e-5)
    tokens = (1 - 0.6**4) / 0.4
    assert speed.step_seconds == pytest.approx(verify + draft + 2e-4 + 4 * (1e-5 + 2e-5 + 3 * 1e-6))
    plain = predict(here, DraftPlan(name="none"))
    assert plain.step_seconds == pytest.approx(plain.verify_seconds + 2e-4 + 4 * 1e-5)
    assert speed.tokens_per_second == pytest.approx(4 * tokens / speed.step_seconds)


def test_a_plan_that_adapts_takes_the_best_number_of_nodes_and_never_loses_to_plain() -> None:
    plain = predict(setting(), DraftPlan(name="none"))
    for chance in (0.0, 0.05, 0.5, 0.99):
        adapts = DraftPlan(name="copy", nodes=12, ranks=(chance,))
        each = [predict(setting(), replace(adapts, nodes=nodes, adapts=False)) for nodes in range(13)]
        best = predict(setting(), adapts)
        assert best.tokens_per_second == max(speed.tokens_per_second for speed in each)
        assert best.tokens_per_second >= plain.tokens_per_second


def test_of_equals_the_first_is_chosen() -> None:
    """Plain decoding stands first: a strategy that would draft nothing is no reason to leave it."""
    useless = DraftPlan(name="copy", nodes=12, ranks=(0.0,))
    assert choose([predict(setting(), plan) for plan in (DraftPlan(name="none"), useless)]).name == "none"


@pytest.mark.parametrize("nodes", [1, 4, 8, 16])
@pytest.mark.parametrize("context", [64, 1024])
def test_the_crossover_batch_is_where_brute_force_finds_it(nodes: int, context: int) -> None:
    """By the formula over forwards, written out."""
    chance = 0.5
    tokens = sum(chance**level for level in range(nodes + 1))

    def wins(batch: int) -> bool:
        plain = MACHINE.forward(SHAPE, ForwardShape(batch=batch, context=context))
        verify = MACHINE.forward(SHAPE, ForwardShape(batch=batch, rows=nodes + 1, context=context))
        return tokens / verify > 1 / plain

    expected = next((batch for batch in range(1, 129) if not wins(batch)), None)
    plan = DraftPlan(name="copy", nodes=nodes, ranks=(chance,), adapts=False)
    assert crossover(setting(context=context), plan, most=128) == expected


def test_a_draft_that_costs_nothing_more_wins_at_any_batch() -> None:
    idle = replace(MACHINE, rate=1e18, attention_rate=1e18, bandwidth=1e12, vector_bandwidth=1e15)
    assert crossover(setting(machine=idle), DraftPlan(name="copy", nodes=2, ranks=(0.9,)), most=16) is None


@pytest.mark.parametrize(("chance", "nodes"), [(0.0, 3), (0.5, 1), (0.6, 4), (0.9, 6), (1.0, 5)])
def test_tokens_of_steps_whose_drafts_are_written_meanwhile(chance: float, nodes: int) -> None:
    """By playing them: a step is ready for the next one if its draft and the token after it are right."""
    draw, ready, tokens, steps = random.Random(1), False, 0, 20_000
    for _ in range(steps):
        drafted = nodes if ready else 0
        right = next((place for place in range(drafted + 1) if draw.random() >= chance), drafted + 1)
        tokens += min(right, drafted) + 1
        ready = right == drafted + 1
    assert tokens / steps == pytest.approx(tokens_beside(chance, nodes), rel=0.02)


def test_a_drafter_beside_the_target_costs_what_it_takes_longer_than_the_forward() -> None:
    """A step takes the forward alone with a quick drafter, and the drafter's forwards with one of the target's size."""
    apart = DraftPlan(name="apart", nodes=4, ranks=(0.8,), adapts=False, drafter=SMALL)
    quick, serial = predict(setting(), replace(apart, beside=True)), predict(setting(), apart)
    assert quick.draft_seconds == 0.0
    assert quick.step_seconds == pytest.approx(serial.step_seconds - serial.draft_seconds)
    slow = predict(setting(), replace(apart, beside=True, drafter=SHAPE))
    level = predict(setting(), replace(apart, drafter=SHAPE)).draft_seconds / 4
    assert slow.draft_seconds + slow.verify_seconds == pytest.approx(5 * level)
