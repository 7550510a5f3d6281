"""DynaMo: a joint distribution of two tokens ranks a verified tree, or is drawn from where nothing is promised."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parlay.drafters.heads.dynamo import UNVERIFIED, Dynamo, otsu
from parlay.drafters.options import DYNAMO, DynamoOptions
from parlay.drafters.resources import Resources
from parlay.heads.base import ParallelHeads
from parlay.heads.ngrams import Ngrams
from parlay.heads.opening import OpenHead
from parlay.options import UsageError
from parlay.sampling.rules.lossy import Unverified
from parlay.strategies.accept_rules import RULES
from parlay.strategies.spelling import parse
from parlay.testing.random_heads import random_heads
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import NO_DRAFT, Draft, Exactness, NoiseKey, Observation, Request, Tree, Verdict, trees
from tests.drafters.sight import GREEDY, SAMPLED, Sight, no_runner

VOCAB, LATTICE = 24, 5
TARGET = ToyRunner(RandomLogits(VOCAB), VOCAB).spec
RESOURCES = Resources(VOCAB, no_runner, find_head=random_heads(TARGET))
TOKENS = [3, 1, 4, 1, 5]
STATES_TH = torch.randn(4, TARGET.hidden_size, generator=torch.Generator().manual_seed(0))


def draft(options: DynamoOptions, rule: str = "shared-noise", request: Request = GREEDY) -> Draft:
    view = Sight(tokens=TOKENS, request=request)
    drafter = Dynamo(replace(RESOURCES, rule=rule), options)
    drafter.observe([Observation(view, NO_DRAFT, Verdict((), ()), {TARGET.num_layers: STATES_TH})])
    (found,) = drafter.propose([view], [12])
    return found


def joint() -> dict[tuple[int, int], float]:
    """The chance of each pair after the root, by the definition."""
    held = random_heads(TARGET)(DYNAMO, "")
    assert isinstance(held, OpenHead)
    assert isinstance(held.embedding, Tensor)
    tensors = {name: each for name, each in held.artefact.tensors.items() if "ngrams" not in name}
    heads = ParallelHeads(held.artefact.layer, len(tensors["d2t"]), 2)
    heads.load_state_dict(tensors)
    counts, root = Ngrams(held.artefact.tensors, VOCAB), TOKENS[-1]
    with torch.no_grad():
        read = [heads.head(place, STATES_TH[None], rows=1)[0, -1] for place in range(2)]
    probs = [(held.embedding[heads.draft_ids] @ each).softmax(-1).topk(LATTICE) for each in read]
    pairs: dict[tuple[int, int], float] = {}
    for x, p in zip(heads.draft_ids[probs[0].indices].tolist(), probs[0].values.tolist(), strict=True):
        for y, q in zip(heads.draft_ids[probs[1].indices].tolist(), probs[1].values.tolist(), strict=True):
            together = counts.probability([root], x) * counts.probability([root, x], y)
            pairs[x, y] = p * q * together / (counts.probability([], x) * counts.probability([], y))
    return pairs


def test_a_trees_nodes_have_the_chances_that_the_joint_distribution_gives_them() -> None:
    found, pairs = draft(DynamoOptions(lattice=LATTICE, width=3, min_p=0)), joint()
    assert max(trees.depths(found.tree)) == 2
    for node, parent in enumerate(found.tree.parents):
        path = [found.tree.tokens[step] for step in trees.path_to(found.tree, node)]
        agreeing = sum(chance for pair, chance in pairs.items() if list(pair[: len(path)]) == path)
        above = sum(chance for pair, chance in pairs.items() if parent < 0 or pair[0] == path[0])
        assert found.scores[node] == pytest.approx(agreeing / above, abs=1e-4)


DRAWS = 150


def test_unverified_chains_are_drawn_from_the_joint_distribution() -> None:
    pairs, options = joint(), DynamoOptions(lattice=LATTICE, eps=0, otsu=False)
    request = replace(SAMPLED, params=replace(SAMPLED.params, temperature=1.0))
    drawn: dict[int, int] = {}
    for seed in range(DRAWS):
        found = draft(options, UNVERIFIED, replace(request, key=NoiseKey(seed)))
        assert found.tree.parents == (-1, 0)
        assert tuple(found.tree.tokens) in pairs
        drawn[found.tree.tokens[0]] = drawn.get(found.tree.tokens[0], 0) + 1
    for first in {pair[0] for pair in pairs}:
        share = sum(chance for pair, chance in pairs.items() if pair[0] == first) / sum(pairs.values())
        assert abs(drawn.get(first, 0) / DRAWS - share) < 4 * (share * (1 - share) / DRAWS) ** 0.5 + 1e-9


@pytest.mark.parametrize("request_", [GREEDY, SAMPLED])
def test_pairs_below_the_threshold_shorten_the_chain(request_: Request) -> None:
    pairs = joint()
    best_pair = max(pairs.values())
    lengths = [len(draft(DynamoOptions(lattice=LATTICE, eps=eps, otsu=False), UNVERIFIED, request_)) for eps in (0, 1)]
    assert lengths[0] == 2
    if request_ is GREEDY:  # whose joint distribution is that at temperature 1
        alone = [len(draft(DynamoOptions(lattice=LATTICE, eps=eps, otsu=False), UNVERIFIED)) for eps in (1e-3, 0.999)]
        assert alone[0] == 2
        assert (alone[1] == 2) == (best_pair >= 0.999**2)


def test_otsu_parts_two_heaps() -> None:
    low, high = torch.linspace(0, 0.1, 50), torch.linspace(0.8, 1, 10)
    assert 0.1 <= otsu(torch.cat((low, high))) <= 0.8
    assert otsu(torch.ones(5)) == 0


def test_the_rule_commits_the_whole_draft_and_says_that_it_is_lossy() -> None:
    chain = Draft(Tree((7, 8), (-1, 0)), sources=(DYNAMO, DYNAMO))
    logits_RV = torch.zeros(3, VOCAB)
    logits_RV[2, 9] = 50
    (verdict,) = Unverified().accept([Sight(tokens=TOKENS)], [chain], logits_RV, [0])
    assert verdict == Verdict((0, 1), (7, 8, 9))
    assert Unverified().exactness is RULES[UNVERIFIED].exactness is Exactness.LOSSY


def test_no_other_strategy_takes_what_nobody_verified() -> None:
    assert parse("dynamo:rule=unverified").settings["rule"] == UNVERIFIED
    for strategy in ("medusa", "prompt-lookup", "draft-model"):
        with pytest.raises(UsageError, match="unverified"):
            parse(f"{strategy}:rule=unverified")
