"""What a draft model draws for rules that compare distributions: shapes, each node's distribution, noise of its own."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import pytest
import torch

from parlay.drafters.draft_models.draft_model import DraftModel
from parlay.drafters.draft_models.drawn_trees import Beam, Distinct, OpenNode, conditioned
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.sampling.distributions import distribution
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.types import Draft, NoiseKey, Request, SamplingParams, trees
from tests.drafters.sight import MakeRunner, propose

VOCAB = 12
SAMPLED = Request(id="r", prompt=(0,), params=SamplingParams(temperature=0.8, top_k=6), key=NoiseKey(7))
GREEDY = replace(SAMPLED, params=SamplingParams(temperature=0))


EVERY = [
    "rule=rejection",
    "rule=block",
    "rule=k-seq,width=3",
    "rule=multi-candidate,width=2",
    "rule=multi-candidate,branching=3+1",
    "rule=without-replacement,width=2",
    "rule=without-replacement,shape=beam,width=3",
]


@dataclass
class Sight:
    sequence: int
    tokens: list[int]
    request: Request = SAMPLED
    prompt_length: int = field(default=1)


def drafter_on(runner: Any, settings: str) -> DraftModel:
    text = settings if "min_p" in settings else f"{settings},min_p=0"
    drafter = build(parse(f"draft-model:{text}"), Resources(VOCAB, lambda name: runner, default_draft="toy"))
    assert isinstance(drafter, DraftModel)
    return drafter


def same(one: Draft, other: Draft) -> bool:
    assert one.probs is not None
    assert other.probs is not None
    return replace(one, probs=None) == replace(other, probs=None) and torch.equal(one.probs, other.probs)


@pytest.mark.parametrize("settings", EVERY)
def test_each_node_tells_the_processed_distribution_of_its_parent(toy_runner: MakeRunner, settings: str) -> None:
    """Temperature and truncation as the target's rows get them, on the node's own path; the score is its chance."""
    runner, view = toy_runner(), Sight(0, [1, 2, 3])
    draft = propose(drafter_on(runner, settings), view, 7)
    assert draft.probs is not None
    assert len(draft) > 2
    for node, parent in enumerate(draft.tree.parents):
        path = [draft.tree.tokens[above] for above in trees.path_to(draft.tree, parent)]
        expected = distribution(runner.logits([*view.tokens, *path]), view, path)
        torch.testing.assert_close(draft.probs[node], expected)
        assert draft.scores[node] == pytest.approx(float(expected[draft.tree.tokens[node]]))
        assert draft.scores[node] > 0


@pytest.mark.parametrize(
    ("settings", "drafted", "parents"),
    [
        ("rule=rejection", "iid", (-1, 0, 1, 2, 3, 4, 5)),
        ("rule=block", "iid", (-1, 0, 1, 2, 3, 4, 5)),
        ("rule=k-seq,width=3", "iid", (-1, -1, -1, 0, 1, 2, 3)),
        ("rule=multi-candidate,shape=chain,width=2", "iid", (-1, -1, 0, 1, 2, 3, 4)),
        ("rule=multi-candidate,width=2", "iid", (-1, -1, 0, 0, 1, 1, 2)),
        ("rule=multi-candidate,branching=1+3+1", "iid", (-1, 0, 0, 0, 1, 2, 3)),
        ("rule=without-replacement,width=2", "without_replacement", (-1, -1, 0, 0, 1, 1, 2)),
    ],
)
def test_shapes_hang_on_the_budget_alone(
    toy_runner: MakeRunner, settings: str, drafted: str, parents: tuple[int, ...]
) -> None:
    draft = propose(drafter_on(toy_runner(), settings), Sight(0, [1, 2, 3]), 7)
    assert (draft.kind, draft.tree.parents) == (drafted, parents)


@pytest.mark.parametrize(
    "settings", ["rule=without-replacement,width=4", "rule=without-replacement,shape=beam,width=4"]
)
def test_siblings_without_replacement_differ(toy_runner: MakeRunner, settings: str) -> None:
    draft = propose(drafter_on(toy_runner(), settings), Sight(0, [1, 2, 3]), 40)
    for siblings in trees.children(draft.tree):
        tokens = [draft.tree.tokens[node] for node in siblings]
        assert len(set(tokens)) == len(tokens)


def test_a_distribution_of_few_tokens_has_no_more_siblings(toy_runner: MakeRunner) -> None:
    view = Sight(0, [1, 2, 3], replace(SAMPLED, params=SamplingParams(top_k=2)))
    draft = propose(drafter_on(toy_runner(), "rule=without-replacement,width=5"), view, 6)
    assert draft.tree.parents == (-1, -1, 0, 0, 1, 1)


def test_a_beam_keeps_so_many_nodes_per_level(toy_runner: MakeRunner) -> None:
    draft = propose(drafter_on(toy_runner(), "rule=without-replacement,shape=beam,width=3"), Sight(0, [1, 2, 3]), 12)
    assert Counter(trees.depths(draft.tree)) == {1: 3, 2: 3, 3: 3, 4: 3}


@pytest.mark.parametrize("drawer", [Distinct((3,)), Beam(3)])
def test_siblings_come_in_the_order_of_drawing_without_replacement(drawer: Any) -> None:
    """Frequencies of ordered triples against the product of what was left each time."""
    probs_V = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    draws, counts = 4000, Counter[tuple[int, ...]]()
    for seed in range(draws):
        view = Sight(0, [1], replace(SAMPLED, key=NoiseKey(seed)))
        counts[tuple(child.token for child in drawer.children(view, 0, [OpenNode(-1, probs_V)], 0))] += 1
    statistic = 0.0
    for order in permutations(range(4), 3):
        chance, left = 1.0, 1.0
        for token in order:
            chance *= float(probs_V[token]) / left
            left -= float(probs_V[token])
        statistic += (counts[order] - draws * chance) ** 2 / (draws * chance)
    assert statistic < 57  # 23 degrees of freedom: less than one in 10,000


def test_values_of_a_beam_are_conditioned_on_their_parents() -> None:
    """-log(exp(-bound) - exp(-most) + exp(-value)): the best child has its parent's value, the others less."""
    assert conditioned(2.0, 2.0, -1.5) == -1.5
    for value in (1.9, 0.0, -5.0):
        exact = -math.log(math.exp(1.5) - math.exp(-2.0) + math.exp(-value))
        assert conditioned(value, 2.0, -1.5) == pytest.approx(exact)
    assert conditioned(-800.0, 3.0, 0.0) == pytest.approx(-800.0)


@pytest.mark.parametrize("settings", EVERY)
def test_a_batch_draws_what_each_sequence_draws_alone(toy_runner: MakeRunner, settings: str) -> None:
    views = [Sight(number, [number, *range(1, 2 + 4 * number)]) for number in range(3)]
    together = drafter_on(toy_runner(), settings).propose(views, [5, 9, 2])
    for view, budget, draft in zip(views, [5, 9, 2], together, strict=True):
        assert same(draft, propose(drafter_on(toy_runner(), settings), view, budget))
        assert len(draft) == budget


@pytest.mark.parametrize("settings", EVERY)
def test_whatever_was_committed_the_next_draft_is_that_of_a_fresh_drafter(
    toy_runner: MakeRunner, settings: str
) -> None:
    runner = toy_runner()
    drafter, view = drafter_on(runner, settings), Sight(0, [1, 2, 3])
    for commit in ("all", "none", "some", "all", "rewind", "some"):
        draft = propose(drafter, view, 5)
        assert same(draft, propose(drafter_on(toy_runner(), settings), replace(view, tokens=list(view.tokens)), 5))
        path = [draft.tree.tokens[node] for node in trees.first_path(draft.tree)]
        if commit == "rewind":
            del view.tokens[4:]
        else:
            view.tokens += [*path[: {"all": 9, "none": 0, "some": 1}[commit]], 11]


def test_another_step_draws_anew_at_the_same_position(toy_runner: MakeRunner) -> None:
    """What was drawn in vain may have had a part in the verdict, so it must not come again."""
    runner = toy_runner()
    runner.logits = lambda prefix: torch.zeros(VOCAB)
    drafts = [propose(drafter_on(runner, "rule=block"), Sight(0, [1] * size), 12).tree.tokens for size in (3, 4)]
    assert drafts[0][1:] != drafts[1][:-1]
    assert sum(one == other for one, other in zip(drafts[0][1:], drafts[1], strict=False)) < 5


def test_what_was_drawn_stays_and_an_unlikely_path_ends_below_it(toy_runner: MakeRunner) -> None:
    """Unlike fixed guesses, of which the unlikely one itself is left out."""
    for size in range(3, 12):
        draft = propose(drafter_on(toy_runner(), "rule=rejection,min_p=0.2"), Sight(0, [1] * size), 50)
        reach = torch.tensor(draft.scores).cumprod(0)
        assert reach[-1] < 0.2
        assert (reach[:-1] >= 0.2).all()


@pytest.mark.parametrize("settings", EVERY)
def test_greedy_requests_get_the_models_own_continuation_and_no_node_twice(
    toy_runner: MakeRunner, settings: str
) -> None:
    runner = toy_runner()
    draft = propose(drafter_on(runner, settings), Sight(0, [1, 2, 3], GREEDY), 5)
    assert list(draft.tree.tokens) == runner.continuation([1, 2, 3], 5)
    assert trees.is_chain(draft.tree)


def test_unusable_logits_end_a_draft(toy_runner: MakeRunner) -> None:
    runner = toy_runner()
    runner.logits = lambda prefix: torch.full((VOCAB,), torch.nan)
    for settings in EVERY:
        assert len(propose(drafter_on(runner, settings), Sight(0, [1, 2]), 3)) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("rule=rejection,shape=tree", ["rule=rejection", "shape=tree", "chain"]),
        ("rule=without-replacement,shape=chain", ["rule=without-replacement", "tree or beam"]),
        ("shape=beam", ["rule=shared-noise", "shape=beam", "chain or tree"]),
        ("rule=multi-candidate,branching=2+x", ["branching must be", "3+2+1", "got 2+x"]),
        ("rule=multi-candidate,branching=0", ["branching must be", "got 0"]),
        ("branching=2", ["branching", "rule=shared-noise"]),
        ("rule=k-seq,branching=2", ["branching", "k-seq"]),
    ],
)
def test_what_a_rule_can_not_judge_is_refused_in_one_line(
    toy_runner: MakeRunner, settings: str, words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        drafter_on(toy_runner(), settings)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_several_drafts_on_a_runner_without_trees_are_refused(toy_runner: MakeRunner) -> None:
    with pytest.raises(UsageError, match="can't verify trees; use a rule that draws one chain"):
        drafter_on(toy_runner(trees=False), "rule=k-seq")
    assert len(propose(drafter_on(toy_runner(trees=False), "rule=block"), Sight(0, [1]), 3)) == 3
