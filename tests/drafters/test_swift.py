"""SWIFT: the search beside generation and the comb of guesses, on layers whose logits are known, and on toys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from parlay.drafters.resources import Resources
from parlay.drafters.self_speculation.skipping import ChainDraft
from parlay.drafters.self_speculation.swift import Swift, comb
from parlay.engine import Engine
from parlay.options import UsageError
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.testing.conformance import default_stages, subject_of
from parlay.testing.conformance.recorder import RecordingRunner, Texts
from parlay.testing.conformance.stage import PLAIN, StageRequest, Steady
from parlay.testing.toys import text_hash
from parlay.types import (
    NO_DRAFT,
    Drafter,
    RunnerSpec,
    SamplingParams,
    Skip,
    trees,
)
from tests.drafters.own_layers import LOGITS, TARGET, VOCAB, LayeredSight, Layers
from tests.drafters.sight import GREEDY, no_runner

GOOD: Skip = frozenset({("attention", 1), ("attention", 4), ("mlp", 2), ("mlp", 3)})
"""What `only_one_is_good` can do without."""


def only_one_is_good(text: Sequence[int], skip: Skip) -> Tensor:
    """Each sub-layer that is left out and should not be makes one more of eight texts come out wrong."""
    wrong = text_hash(text) % 8 < len(skip - GOOD)
    return -LOGITS(text) if wrong else LOGITS(text)


@dataclass
class Sight(LayeredSight):
    layers: Layers = field(default_factory=lambda: Layers(only_one_is_good))


def made(settings: str = "", target: RunnerSpec | None = TARGET, name: str = "swift") -> Drafter:
    drafter = build(parse(f"{name}:{settings}"), Resources(VOCAB, no_runner, target=target))
    assert drafter is not None
    return drafter


def generate(drafter: Drafter, view: Sight, tokens: int) -> None:
    """The target writes on greedily, a draft asked for at each token."""
    for _ in range(tokens):
        view.tokens.append(int(LOGITS(view.tokens).argmax()))
        drafter.propose([view], [3])


# --------------------------------------------------------------------------------------------------------- the search


def test_the_search_finds_the_set_ends_and_serves_later_requests() -> None:
    drafter, view = made("every=2"), Sight(0, [3])
    generate(drafter, view, 200)
    assert len(view.layers.tried) < 150, "the search goes on although a set agrees entirely"
    assert view.layers.calls[-1][1:] == (GOOD, 1)
    later = Sight(1, [7, 7])
    generate(drafter, later, 60)
    assert {skip for _, skip, _ in later.layers.calls} == {GOOD}
    assert not later.layers.tried


def test_sets_are_tried_one_per_step_at_the_papers_size_and_on_the_window() -> None:
    """.45 of eight inner sub-layers; no probe before there are 32 tokens of output; 33 rows show 32 tokens."""
    drafter, view = made("enough=1"), Sight(0, [3])
    generate(drafter, view, 31)
    assert not view.layers.tried
    generate(drafter, view, 10)
    assert len(view.layers.tried) == 10
    assert {len(skip) for skip in view.layers.tried} == {4}
    assert all(0 < layer < 5 for skip in view.layers.tried for _, layer in skip)
    assert {rows for _, _, rows in view.layers.calls} == {1, 33}


@pytest.mark.parametrize(("settings", "probes"), [("probes=7", 7), ("probes=0", 0), ("patience=5", 5 + 1)])
def test_the_search_gives_up(settings: str, probes: int) -> None:
    """After so many sets, or so many no better than the first."""
    view = Sight(0, [3], Layers(lambda text, skip: -LOGITS(text)))
    generate(made(settings), view, 60)
    assert len(view.layers.tried) == probes


def test_agreement_is_that_of_the_requests_own_sampler() -> None:
    """A sampled text agrees with itself too, since the noise is the same at the same place."""
    request = replace(GREEDY, params=SamplingParams(temperature=1.0, repetition_penalty=1.2))
    layers = Layers(lambda text, skip: LOGITS(text))
    view, drafter = Sight(0, [3], layers, request), made()
    for _ in range(40):
        view.tokens += made("probes=0,threshold=0,width=1").propose([view], [1])[0].tree.tokens
        drafter.propose([view], [2])
    assert len(layers.tried) == 1, "the first set agrees entirely"


def test_requests_that_no_store_may_learn_from_are_not_looked_at() -> None:
    view = Sight(0, [3], request=replace(GREEDY, store=False))
    generate(made(), view, 40)
    assert not view.layers.tried
    assert view.layers.calls


def steps(spec: str, stage: str) -> tuple[list[int], Texts]:
    """The text and every row of logits that the target gave, by the text before it."""
    here = default_stages()[stage]
    recorder = RecordingRunner(here.open_runner(4096))
    engine = Engine(recorder, Steady())
    tokens: list[int] = []
    strategy = (subject_of(spec) if spec else PLAIN).strategy(here, 5)
    engine.add(StageRequest((1, 2, 3, 4, 5), SamplingParams(temperature=0.0, max_tokens=120)).request("r"), strategy)
    while not engine.idle:
        tokens += [one.token for event in engine.step() for one in event.committed]
        recorder.check()
    return tokens, recorder.texts


@pytest.mark.parametrize("stage", ["toy", "native float32", "native bfloat16"])
def test_the_search_touches_nothing_that_is_committed(stage: str) -> None:
    """A probe runs committed tokens again at each step; no logit that the target gives later differs by a bit."""
    tokens, texts = steps("", stage)
    searched, seen = steps("swift:window=16,every=2,ratio=0.6,enough=1", stage)
    assert searched == tokens
    for text, rows in texts.items():
        for row in seen.get(text, []):
            assert torch.equal(row, rows[0])
    assert len(texts.keys() & seen.keys()) == len(texts)


# ----------------------------------------------------------------------------------------------------------- the comb


def test_a_comb_is_the_chain_with_its_alternatives_likeliest_path_first() -> None:
    view = Sight(0, [0])
    plan = ChainDraft(
        view, budget=5, threshold=0, tokens=[1, 4], levels=[[(1, 0.6), (2, 0.3), (3, 0.1)], [(4, 0.8), (5, 0.2)]]
    )
    draft = comb(plan)
    assert draft.tree.tokens == (1, 4, 2, 5, 3)  # .6, .48, .3, .12, .1
    assert draft.tree.parents == (-1, 0, -1, 0, -1)
    assert draft.scores == (0.6, 0.8, 0.3, 0.2, 0.1)
    assert comb(replace(plan, budget=3)).tree == trees.first(draft, 3).tree
    assert comb(ChainDraft(view, 5, 0)) == NO_DRAFT


def test_a_sampled_step_keeps_the_drawn_token_as_the_spine_though_another_is_likelier() -> None:
    plan = ChainDraft(Sight(0, [0]), 4, 0, [1, 4], [[(1, 0.1), (2, 0.9)], [(4, 0.0), (5, 1.0)]])
    draft = comb(plan)
    assert sorted(zip(draft.tree.tokens, draft.tree.parents, strict=True)) == [(1, -1), (2, -1), (4, 1), (5, 1)]
    assert draft.tree.tokens[1] == 1


def test_a_draft_ends_after_an_unsure_step_with_its_alternatives() -> None:
    """Worked by hand: sure of 3 and 4, torn between 5 and 6."""
    table = {3: {3: 9.0}, 4: {4: 9.0}, 5: {5: 1.0, 6: 0.9}}

    def logits_of(text: Sequence[int], skip: Skip) -> Tensor:
        logits_V = torch.full((VOCAB,), -4.0)
        for token, value in table[len(text)].items():
            logits_V[token] = value
        return logits_V

    (draft,) = made("width=2").propose([Sight(0, [0, 1, 2], Layers(logits_of))], [8])
    paths = {tuple(draft.tree.tokens[node] for node in path) for path in trees.leaf_paths(draft.tree)}
    assert {(3, 4, 5), (3, 4, 6)} <= paths
    assert len(draft) == 6, "two tokens at each of three steps"


def test_it_differs_from_skipping_alone_by_its_leaves() -> None:
    """Same set, same text: one writes the chain, the other adds what nearly was in it."""
    settings = "ratio=0.45,threshold=0"
    view = Sight(0, [1, 2, 3])
    (chain,) = made(settings, name="layer-skip").propose([view], [3])
    (tree,) = made(f"{settings},width=4").propose([view], [12])
    assert trees.is_chain(chain.tree)
    assert not trees.is_chain(tree.tree)
    assert chain.tree.tokens in {
        tuple(tree.tree.tokens[node] for node in trees.path_to(tree.tree, leaf))[:3] for leaf in range(len(tree))
    }


@pytest.mark.parametrize("budget", [0, 1, 2, 7, 1000])
def test_any_budget_is_kept(budget: int) -> None:
    view = Sight(0, [1, 2, 3], Layers(lambda text, skip: torch.zeros(VOCAB)))
    (draft,) = made().propose([view], [budget])
    assert len(draft) <= budget
    assert len(draft) == min(budget, 10)


def test_where_nothing_can_be_left_out_it_says_so() -> None:
    for target in (replace(TARGET, num_layers=2), replace(TARGET, layer_skip=False), None):
        with pytest.raises(UsageError, match="strategy swift"):
            made(target=target)
    with pytest.raises(UsageError, match=r"ratio=0 skips none of the 8 inner attention and MLP blocks of six"):
        made("ratio=0")


def test_a_vocabulary_smaller_than_the_width_is_used_up() -> None:
    drafter = made("width=64,threshold=1")
    assert isinstance(drafter, Swift)
    assert len(drafter.propose([Sight(0, [1])], [100])[0]) == VOCAB
