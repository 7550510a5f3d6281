"""Probes: rows computed for a drafter's sake, on top of its budget, that never cost a token and give way first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from parlay.engine import Engine, Limits
from parlay.router.policies import Fixed
from parlay.sampling.rules import SharedNoise
from parlay.testing.conformance.stage import Steady
from parlay.testing.toy_drafters import ToyDrafter, gold
from parlay.testing.toys import ToyRunner
from parlay.types import (
    NO_SKIP,
    Draft,
    Metrics,
    NoiseKey,
    Output,
    Request,
    SamplingParams,
    Segment,
    SequenceView,
    Skip,
    Strategy,
    Tree,
    trees,
)
from tests.engine.toy_engine import ANSWER, LOGITS, VOCAB

PROBES = 6


def oracle_with_probes(view: SequenceView, budget: int) -> Draft:
    """A chain of the truth, and beside it a chain of probes below the root."""
    chain = trees.chain_tree(gold(ANSWER, view, budget))
    probes = tuple(range(PROBES))
    parents = (-1, *(budget + place for place in range(PROBES - 1)))
    tree = Tree(chain.tokens + probes, chain.parents + parents)
    return Draft(tree, sources=("toy",) * len(tree), probes=PROBES)


class Watched(ToyRunner):
    """Remembers how many nodes each forward had."""

    def __init__(self, max_context: int = 4096) -> None:
        super().__init__(LOGITS, VOCAB, max_context=max_context)
        self.nodes: list[int] = []

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        self.nodes.append(sum(len(segment.tree) for segment in segments))
        return super().forward(segments, taps, skip)


def decode(runner: Watched, tokens: int, budget: int, limits: Limits) -> Metrics:
    engine = Engine(runner, Steady(), limits)
    params = SamplingParams(temperature=0, max_tokens=tokens)
    request = Request(id="r", prompt=(1, 2, 3), params=params, key=NoiseKey(0))
    engine.add(request, Strategy("toy", (ToyDrafter(oracle_with_probes),), SharedNoise(), Fixed(budget)))
    while True:
        for event in engine.step():
            if event.metrics is not None:
                assert event.error is None
                return event.metrics


def test_probes_stand_on_top_of_the_budget_and_are_no_proposals() -> None:
    runner = Watched()
    metrics = decode(runner, 40, 3, Limits())
    assert runner.nodes == [3 + PROBES] * 10
    assert metrics.tokens_per_step == 4
    assert metrics.draft_tokens == metrics.accepted_tokens == 30


def test_probes_give_way_to_nodes_when_rows_run_out() -> None:
    runner = Watched()
    metrics = decode(runner, 40, 3, Limits(max_draft_rows=PROBES))
    assert set(runner.nodes) == {3}
    assert metrics.tokens_per_step == 4


@pytest.mark.parametrize("room", [PROBES + 2, PROBES + 9])
def test_probes_never_reach_beyond_the_context_and_take_no_node_with_them(room: int) -> None:
    runner = Watched(max_context=3 + room)
    metrics = decode(runner, 100, 3, Limits())
    assert metrics.completion_tokens == room
    assert metrics.steps == -(-room // 4)
    left = [room - 4 * step for step in range(metrics.steps)]
    nodes = [min(3, before - 1) for before in left]
    assert runner.nodes == [
        count + PROBES if count and count + PROBES <= before else count
        for count, before in zip(nodes, left, strict=True)
    ]


def test_a_probe_goes_with_the_node_it_hangs_on() -> None:
    draft = Draft(Tree((1, 2, 3, 4, 5), (-1, 0, -1, 1, 0)), sources=("",) * 5, probes=2)
    assert trees.prune(draft, [0, 2]).tree == Tree((1, 3, 5), (-1, -1, 0))
    assert trees.prune(draft, [0, 2]).probes == 1
    assert trees.prune(replace(draft, probes=0), [2]).tree == Tree((3,), (-1,))
