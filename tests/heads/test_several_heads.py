"""Drafters of several heads propose what the trained modules say: their best tokens, in the tree that was measured."""

from __future__ import annotations

import torch
from torch import Tensor

from parlay import trees
from parlay.drafters.draft_models.static_trees import best_tree
from parlay.drafters.heads.hydra import Hydra
from parlay.drafters.heads.medusa import Medusa
from parlay.drafters.heads.options import HYDRA, MEDUSA, HeadOptions
from parlay.drafters.resources import Resources
from parlay.heads.hydra import HydraHeads
from parlay.heads.medusa import MedusaHeads
from parlay.heads.opening import OpenHead
from parlay.heads.several import SeveralHeadsConfig
from parlay.testing.random_heads import random_heads
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import NO_DRAFT, Draft, Drafter, Observation, Verdict
from tests.drafters.sight import Sight, no_runner

VOCAB, BUDGET = 24, 8
TARGET = ToyRunner(RandomLogits(VOCAB), VOCAB).spec
CONFIG = SeveralHeadsConfig(TARGET.hidden_size, VOCAB, VOCAB // 2, 3)
VIEW = Sight(tokens=[3, 1, 4, 1, 5])
STATES_TH = torch.randn(4, TARGET.hidden_size, generator=torch.Generator().manual_seed(0))
RESOURCES = Resources(VOCAB, no_runner, find_head=random_heads(TARGET))


def opened(method: str) -> OpenHead:
    found = random_heads(TARGET)(method, "")
    assert found is not None
    return found


def draft(drafter: Drafter) -> Draft:
    """After one step has shown the states of all tokens before the root."""
    drafter.observe([Observation(VIEW, NO_DRAFT, Verdict((), ()), {TARGET.num_layers: STATES_TH})])
    (found,) = drafter.propose([VIEW], [BUDGET])
    return found


def test_medusas_tree_holds_the_best_tokens_of_each_head() -> None:
    head = opened(MEDUSA)
    heads = MedusaHeads(CONFIG)
    heads.load_state_dict(dict(head.artefact.tensors))
    found = draft(Medusa(RESOURCES, HeadOptions()))

    best_KW = heads.draft_ids[heads(STATES_TH[-1]).topk(3).indices].tolist()
    shape = best_tree(head.artefact.settings["acceptance"], BUDGET, 3)
    assert found.tree.parents == shape.parents
    expected = [best_KW[depth - 1][rank] for depth, rank in zip(shape.depths, shape.ranks, strict=True)]
    assert list(found.tree.tokens) == expected


def test_hydras_tree_holds_the_best_tokens_after_each_path() -> None:
    head = opened(HYDRA)
    heads = HydraHeads(CONFIG)
    heads.load_state_dict(dict(head.artefact.tensors))
    embedding_VH = head.embedding
    assert isinstance(embedding_VH, Tensor)
    found = draft(Hydra(RESOURCES, HeadOptions()))

    shape = best_tree(head.artefact.settings["acceptance"], BUDGET, 3)
    assert found.tree.parents == shape.parents
    for node, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True)):
        above = [found.tree.tokens[step] for step in trees.path_to(found.tree, parent)] if parent >= 0 else []
        path = torch.tensor([VIEW.tokens[-1], *above])
        embedded_K = embedding_VH[path].bfloat16().float().flatten()
        best_W = heads.draft_ids[heads.heads[len(above)](STATES_TH[-1], embedded_K).topk(3).indices]
        assert found.tree.tokens[node] == best_W[rank]


def test_fresh_heads_guess_like_their_vocabularies_alone() -> None:
    hidden_TH = torch.randn(3, TARGET.hidden_size)
    medusa, hydra = MedusaHeads(CONFIG), HydraHeads(CONFIG)
    for place, logits_TD in enumerate(medusa(hidden_TH)):
        torch.testing.assert_close(logits_TD, medusa.lm_heads[place](hidden_TH))
    for place, head in enumerate(hydra.heads):
        embedded = torch.randn(3, (place + 1) * TARGET.hidden_size)
        torch.testing.assert_close(head(hidden_TH, embedded), head.get_submodule("lm_head")(hidden_TH))
