"""Medusa's drafter proposes what the trained module says: the ranks of its heads, in the tree that was measured."""

from __future__ import annotations

import torch

from parlay.drafters.draft_models.static_trees import best_tree
from parlay.drafters.heads.medusa import Medusa
from parlay.drafters.heads.options import MEDUSA, MedusaOptions
from parlay.drafters.resources import Resources
from parlay.heads.medusa import MedusaConfig, MedusaHeads
from parlay.testing.random_heads import random_heads
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import NO_DRAFT, Observation, Verdict
from tests.drafters.sight import Sight, no_runner

VOCAB = 24
TARGET = ToyRunner(RandomLogits(VOCAB), VOCAB).spec


def test_a_tree_holds_the_best_tokens_of_each_head() -> None:
    found = random_heads(TARGET)(MEDUSA, "")
    assert found is not None
    heads = MedusaHeads(MedusaConfig(TARGET.hidden_size, VOCAB, VOCAB // 2, 3))
    heads.load_state_dict(dict(found.artefact.tensors))
    drafter = Medusa(Resources(VOCAB, no_runner, find_head=random_heads(TARGET)), MedusaOptions())
    view = Sight(tokens=[3, 1, 4, 1, 5])
    state_TH = torch.randn(4, TARGET.hidden_size)
    drafter.observe([Observation(view, NO_DRAFT, Verdict((), ()), {TARGET.num_layers: state_TH})])
    (draft,) = drafter.propose([view], [6])

    best_KW = heads.draft_ids[heads(state_TH[-1]).topk(3).indices].tolist()
    shape = best_tree(found.artefact.settings["acceptance"], 6, 3)
    assert draft.tree.parents == shape.parents
    expected = [best_KW[depth - 1][rank] for depth, rank in zip(shape.depths, shape.ranks, strict=True)]
    assert list(draft.tree.tokens) == expected


def test_a_fresh_head_guesses_like_its_vocabulary_alone() -> None:
    heads = MedusaHeads(MedusaConfig(8, VOCAB, 5, 2))
    hidden_TH = torch.randn(3, 8)
    for place, logits_TD in enumerate(heads(hidden_TH)):
        torch.testing.assert_close(logits_TD, heads.lm_heads[place](hidden_TH))
