"""Blockwise decoding: heads before the target's LM head, and guesses reordered by what follows well."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parlay.drafters.heads.blockwise import Blockwise
from parlay.drafters.options import BLOCKWISE, BlockwiseOptions
from parlay.drafters.resources import Resources
from parlay.heads import ngrams
from parlay.heads.blockwise import WINDOW, BlockwiseHeads
from parlay.testing.random_heads import random_heads
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import NO_DRAFT, Draft, Observation, Verdict, trees
from tests.drafters.sight import Sight, no_runner

VOCAB, LATTICE, WEIGHT = 24, 5, 0.4
TARGET = ToyRunner(RandomLogits(VOCAB), VOCAB).spec
VIEW = Sight(tokens=[3, 1, 4, 1, 5])
STATES_TH = torch.randn(4, TARGET.hidden_size, generator=torch.Generator().manual_seed(0))


def draft(options: BlockwiseOptions, budget: int = 12) -> Draft:
    drafter = Blockwise(Resources(VOCAB, no_runner, find_head=random_heads(TARGET)), options)
    drafter.observe([Observation(VIEW, NO_DRAFT, Verdict((), ()), {TARGET.num_layers: STATES_TH})])
    (found,) = drafter.propose([VIEW], [budget])
    return found


class Reference:
    """The chance of each token after a path, from the trained module itself."""

    def __init__(self) -> None:
        head = random_heads(TARGET)(BLOCKWISE, "")
        assert head is not None
        assert isinstance(head.embedding, Tensor)
        held = head.artefact
        self.heads, self.embedding_VH = BlockwiseHeads.of(held), head.embedding.bfloat16().float()
        self.heads.load_state_dict({name: each for name, each in held.tensors.items() if "ngrams" not in name})
        self.counted = ngrams.Ngrams(held.tensors, VOCAB)
        self.ids = self.heads.draft_ids.tolist()

    def head(self, depth: int) -> Tensor:
        state_H = self.heads.heads[depth - 1](STATES_TH[-1])
        return (self.embedding_VH[self.heads.draft_ids] @ state_H).log_softmax(-1)

    def model(self, by: str, text: list[int]) -> Tensor:
        if by == "ngram":
            return torch.tensor(self.counted.log_probabilities(text, self.ids))
        return self.heads.rescorer(self.embedding_VH[torch.tensor(text[-WINDOW:])].flatten()).log_softmax(-1)

    def probs(self, by: str, path: list[int]) -> dict[int, float]:
        own_D = self.head(len(path) + 1)
        if by != "none":
            best = own_D.topk(LATTICE).indices
            mixed_D = (1 - WEIGHT) * own_D + WEIGHT * self.model(by, [*VIEW.tokens, *path])
            own_D = torch.full_like(own_D, -torch.inf).scatter(0, best, mixed_D[best]).log_softmax(-1)
        return dict(zip(self.ids, own_D.exp().tolist(), strict=True))


@pytest.mark.parametrize("by", ["none", "neural", "ngram"])
def test_every_node_has_the_chance_that_heads_and_model_give_its_token(by: str) -> None:
    options = BlockwiseOptions(rescore=by, width=3, min_p=0)
    found = draft(options if by == "none" else replace(options, weight=WEIGHT, lattice=LATTICE))
    reference = Reference()
    assert max(trees.depths(found.tree)) > 1
    for node, token in enumerate(found.tree.tokens):
        path = [found.tree.tokens[step] for step in trees.path_to(found.tree, node)][:-1]
        assert abs(reference.probs(by, path)[token] - found.scores[node]) < 1e-4


@pytest.mark.parametrize("by", ["neural", "ngram"])
def test_rescoring_without_weight_changes_no_order(by: str) -> None:
    plain = draft(BlockwiseOptions(rescore="none", width=2, min_p=0))
    weightless = draft(BlockwiseOptions(rescore=by, weight=0, lattice=VOCAB // 2, width=2, min_p=0))
    assert weightless.tree == plain.tree


def test_the_papers_chain_holds_the_best_guess_of_each_head() -> None:
    found = draft(BlockwiseOptions(rescore="none", width=1, min_p=0))
    reference = Reference()
    assert list(found.tree.tokens) == [reference.ids[int(reference.head(depth).argmax())] for depth in (1, 2, 3)]


def test_ngrams_are_a_distribution_that_knows_what_followed() -> None:
    model = ngrams.Ngrams(ngrams.count([[1, 2, 3] * 20 + [1, 2, 4] * 5]), 8)
    for before in ([], [7], [1, 2], [5, 2], [6, 6]):
        assert abs(sum(model.probability(before, token) for token in range(8)) - 1) < 1e-9
    assert model.probability([1, 2], 3) > model.probability([1, 2], 4) > model.probability([1, 2], 0) > 0
    assert model.probability([5, 2], 3) == model.probability([2], 3), "an unseen pair goes by its last token"
