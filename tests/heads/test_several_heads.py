"""Drafters of several heads propose what the trained modules say: their best tokens, in the tree that was measured."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parlay.drafters.draft_models.static_trees import best_tree
from parlay.drafters.heads.several_heads import Hydra, Medusa, MlpSpeculatorDrafter, ReDrafter
from parlay.drafters.options import HYDRA, MEDUSA, MLP_SPECULATOR, REDRAFTER, BeamOptions, HeadOptions
from parlay.drafters.resources import Resources
from parlay.heads.base import SeveralHeadsConfig
from parlay.heads.hydra import HydraHeads
from parlay.heads.medusa import MedusaHeads
from parlay.heads.mlp_speculator import MlpSpeculator
from parlay.heads.opening import OpenHead
from parlay.heads.redrafter import ReDrafterHead
from parlay.testing.random_heads import PLUS, random_heads
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import NO_DRAFT, Draft, Drafter, Observation, Verdict, trees
from tests.drafters.sight import Sight, no_runner

VOCAB, BUDGET = 24, 8
TARGET = ToyRunner(RandomLogits(VOCAB), VOCAB).spec
CONFIG = SeveralHeadsConfig(TARGET.hidden_size, VOCAB, VOCAB // 2, 3)
VIEW = Sight(tokens=[3, 1, 4, 1, 5])
STATES_TH = torch.randn(4, TARGET.hidden_size, generator=torch.Generator().manual_seed(0))
RESOURCES = Resources(VOCAB, no_runner, find_head=random_heads(TARGET))


def opened(method: str, name: str = "") -> OpenHead:
    found = random_heads(TARGET)(method, name)
    assert found is not None
    return found


def draft(drafter: Drafter, budget: int = BUDGET) -> Draft:
    """After one step has shown the states of all tokens before the root."""
    drafter.observe([Observation(VIEW, NO_DRAFT, Verdict((), ()), {TARGET.num_layers: STATES_TH})])
    (found,) = drafter.propose([VIEW], [budget])
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


@pytest.mark.parametrize("name", ["", PLUS])
def test_hydras_tree_holds_the_best_tokens_after_each_path(name: str) -> None:
    head = opened(HYDRA, name)
    heads = HydraHeads.of(head.artefact)
    heads.load_state_dict(dict(head.artefact.tensors))
    assert (heads.prefix is not None) == (name == PLUS)
    state_H = heads.read(STATES_TH[None], rows=1)[0, -1]
    embedding_VH = head.embedding
    assert isinstance(embedding_VH, Tensor)
    found = draft(Hydra(RESOURCES, HeadOptions(head=name)))

    shape = best_tree(head.artefact.settings["acceptance"], BUDGET, 3)
    assert found.tree.parents == shape.parents
    for node, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True)):
        path = torch.tensor([VIEW.tokens[-1], *above(found, parent)])
        embedded_K = embedding_VH[path].bfloat16().float().flatten()
        best_W = heads.draft_ids[heads.heads[len(path) - 1](state_H, embedded_K).topk(3).indices]
        assert found.tree.tokens[node] == best_W[rank]


def test_the_speculators_tree_follows_its_states_along_each_path() -> None:
    speculator = MlpSpeculator(CONFIG)
    speculator.load_state_dict(dict(opened(MLP_SPECULATOR).artefact.tensors))
    found = draft(MlpSpeculatorDrafter(RESOURCES, HeadOptions()))

    shape = best_tree(opened(MLP_SPECULATOR).artefact.settings["acceptance"], BUDGET, 3)
    assert found.tree.parents == shape.parents
    for node, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True)):
        state, path = speculator.begin(STATES_TH[-1]), [VIEW.tokens[-1], *above(found, parent)]
        for step, token in enumerate(path):
            state = speculator.advance(step, state, torch.tensor(token))
        best_W = speculator.draft_ids[speculator.read(len(path) - 1, state).topk(3).indices]
        assert found.tree.tokens[node] == best_W[rank]


def test_redrafters_tree_merges_the_beams_of_a_beam_search() -> None:
    head, embedding_VH = ReDrafterHead(CONFIG), opened(REDRAFTER).embedding
    head.load_state_dict(dict(opened(REDRAFTER).artefact.tensors))
    assert isinstance(embedding_VH, Tensor)

    def log_probs(path: tuple[int, ...]) -> Tensor:
        state = torch.zeros(TARGET.hidden_size)
        for token in (VIEW.tokens[-1], *path):
            state = head.advance(state, embedding_VH[token].bfloat16().float())
        return head.read(STATES_TH[-1], state).log_softmax(-1)

    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(3):
        longer = [
            (score + more, (*path, int(token)))
            for score, path in beams
            for more, token in zip(log_probs(path).tolist(), head.draft_ids, strict=True)
        ]
        beams = sorted(longer, reverse=True)[:4]
    found = draft(ReDrafter(RESOURCES, BeamOptions(width=4, depth=3)), budget=12)
    leaves = set(range(len(found))) - set(found.tree.parents)
    assert {tuple(above(found, leaf)) for leaf in leaves} == {path for _, path in beams}
    small = draft(ReDrafter(RESOURCES, BeamOptions(width=4, depth=3)), budget=3)
    assert tuple(above(small, 2)) == beams[0][1], "the likeliest beam comes first"


def above(found: Draft, node: int) -> list[int]:
    """The tokens from below the root down to a node."""
    return [found.tree.tokens[step] for step in trees.path_to(found.tree, node)] if node >= 0 else []


def test_fresh_heads_guess_like_their_vocabularies_alone() -> None:
    hidden_TH = torch.randn(3, TARGET.hidden_size)
    medusa, hydra = MedusaHeads(CONFIG), HydraHeads(CONFIG)
    for place, logits_TD in enumerate(medusa(hidden_TH)):
        torch.testing.assert_close(logits_TD, medusa.lm_heads[place](hidden_TH))
    for place, head in enumerate(hydra.heads):
        embedded = torch.randn(3, (place + 1) * TARGET.hidden_size)
        torch.testing.assert_close(head(hidden_TH, embedded), head.get_submodule("lm_head")(hidden_TH))
