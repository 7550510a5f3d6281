"""Drafters that guess all levels at once propose what the trained module says of each token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from parlay.drafters.heads.block import BlockDrafter
from parlay.drafters.heads.mtp import mtp
from parlay.drafters.options import BLOCK_DRAFTER, MTP, BlockOptions, DynamicTreeOptions
from parlay.drafters.resources import Resources
from parlay.heads.base import ParallelHeads
from parlay.heads.block import BlockConfig, BlockHead
from parlay.heads.opening import OpenHead
from parlay.testing.random_heads import PARALLEL, random_heads
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import NO_DRAFT, Draft, Drafter, Observation, Verdict, trees
from tests.drafters.sight import Sight, no_runner

VOCAB = 24
TARGET = ToyRunner(RandomLogits(VOCAB), VOCAB).spec
RESOURCES = Resources(VOCAB, no_runner, find_head=random_heads(TARGET))
TOKENS = [3, 1, 4, 1, 5]


def opened(method: str, name: str = "") -> OpenHead:
    found = random_heads(TARGET)(method, name)
    assert found is not None
    return found


def states_of(taps: Sequence[int]) -> dict[int, Tensor]:
    torch.manual_seed(1)
    return {layer: torch.randn(len(TOKENS) - 1, TARGET.hidden_size) for layer in taps}


def draft(drafter: Drafter, states: dict[int, Tensor]) -> Draft:
    """After two steps, so that some rows are in the head's cache and some run now."""
    for end in (2, 4):
        view = Sight(tokens=TOKENS[: end + 1])
        seen = {layer: state_TH[:end] for layer, state_TH in states.items()}
        drafter.observe([Observation(view, NO_DRAFT, Verdict((), ()), seen)])
        (found,) = drafter.propose([view], [12])
    return found


def check(found: Draft, probs_LD: Tensor, ids_D: Tensor) -> None:
    """Every node scores the probability of its token at its depth; the best first token is there."""
    place = {token: at for at, token in enumerate(ids_D.tolist())}
    depths = trees.depths(found.tree)
    assert 1 < max(depths) <= len(probs_LD)
    for token, depth, score in zip(found.tree.tokens, depths, found.scores, strict=True):
        assert abs(float(probs_LD[depth - 1, place[token]]) - score) < 1e-4
    first = {token for token, depth in zip(found.tree.tokens, depths, strict=True) if depth == 1}
    assert int(ids_D[probs_LD[0].argmax()]) in first


def test_a_block_is_that_of_the_trained_module(monkeypatch: pytest.MonkeyPatch) -> None:
    held = opened(BLOCK_DRAFTER)
    head = BlockHead(BlockConfig.of(held.artefact))
    head.load_state_dict(dict(held.artefact.tensors))

    def fuse(features: Tensor) -> Tensor:
        """The product of the compiled kernels, which round more than torch's."""
        return held.fuse(features.reshape(-1, features.shape[-1])).view(*features.shape[:-1], -1)

    monkeypatch.setattr(head, "fuse", fuse)
    states, embedding_VH = states_of(head.config.taps), held.embedding
    assert isinstance(embedding_VH, Tensor)
    with torch.no_grad():
        fused_TH = head.fuse(torch.cat([states[layer] for layer in head.config.taps], -1))
        rows_TH, mask_H = embedding_VH[torch.tensor(TOKENS[1:])], embedding_VH[head.config.mask_id]
        hidden = list(head.unrolled(fused_TH[None], rows_TH[None], mask_H, None, rows=1))
        probs_LD = torch.stack([head.logits(each)[0, -1].softmax(-1) for each in hidden])
    assert len(probs_LD) == head.config.length
    check(draft(BlockDrafter(RESOURCES, BlockOptions(width=3, min_p=0)), states), probs_LD, head.draft_ids)

    chain = draft(BlockDrafter(RESOURCES, BlockOptions(width=1, min_p=0)), states)
    best_L = probs_LD.max(-1)
    assert chain.tree == trees.chain_tree(head.draft_ids[best_L.indices].tolist())
    assert chain.scores == pytest.approx(best_L.values.tolist(), abs=1e-4)
    shorter = draft(BlockDrafter(RESOURCES, BlockOptions(width=1, min_p=float(best_L.values[0]) - 1e-3)), states)
    assert shorter.tree.tokens == chain.tree.tokens[:1]


def test_parallel_heads_guess_as_the_trained_module() -> None:
    held = opened(MTP, PARALLEL)
    count = held.artefact.settings["heads"]
    heads = ParallelHeads(held.artefact.layer, len(held.artefact.tensors["d2t"]), count)
    heads.load_state_dict(dict(held.artefact.tensors))
    states, embedding_VH = states_of((TARGET.num_layers,)), held.embedding
    assert isinstance(embedding_VH, Tensor)
    with torch.no_grad():
        read = [heads.head(place, states[TARGET.num_layers][None], rows=1)[0, -1] for place in range(count)]
        probs_LD = torch.stack([(embedding_VH[heads.draft_ids] @ each).softmax(-1) for each in read])
    options = DynamicTreeOptions(head=PARALLEL, width=3, min_p=0)
    check(draft(mtp(RESOURCES, options), states), probs_LD, heads.draft_ids)
