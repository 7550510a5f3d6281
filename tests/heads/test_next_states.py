"""Heads on the target's last state: the native decoder that runs them gives the trained module's own numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from parlay.compiled.library import SWITCH
from parlay.drafters.draft_models.static_trees import best_tree
from parlay.drafters.heads.next_states import Eagle
from parlay.drafters.options import EAGLE, MTP, HeadOptions
from parlay.drafters.resources import Resources
from parlay.heads.eagle import EagleHead
from parlay.heads.layer import Steps
from parlay.heads.native import eagle_decoder, mtp_decoder
from parlay.models.native import NativeRunner
from parlay.testing.random_heads import random_heads, random_next_states
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import NO_DRAFT, Features, Observation, Segment, Tree, Verdict
from tests.drafters.sight import Sight, no_runner

VOCAB, BUDGET = 24, 8
TARGET = ToyRunner(RandomLogits(VOCAB), VOCAB).spec
SIZE = TARGET.hidden_size


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("method", [EAGLE, MTP])
def test_the_native_decoder_gives_the_numbers_of_the_trained_module(
    method: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    head, embedding_VH = random_next_states(TARGET, method), torch.randn(VOCAB, SIZE)
    if not compiled:
        monkeypatch.setenv(SWITCH, "0")
    decoder = eagle_decoder if isinstance(head, EagleHead) else mtp_decoder
    config, weights = decoder(head.config, dict(head.state_dict()), embedding_VH)
    runner = NativeRunner(config, weights, dtype=torch.float32, device=torch.device("cpu"), max_tokens_cached=512)

    ids, features_TH = [3, 1, 4, 1, 5, 9, 2, 6, 5], torch.randn(7, SIZE)
    rows_TH, head_DH = embedding_VH[torch.tensor(ids)], embedding_VH[head.draft_ids]
    with torch.no_grad():
        steps = Steps()
        first_TH = head.step(features_TH[None], rows_TH[None, 1:8], steps)[0]
        second_TH = head.step(first_TH[None], rows_TH[None, 2:9], steps)[0]
        read_TH = first_TH if isinstance(head, EagleHead) else head.norm(first_TH)

        runner.open(1, ids[1:8])
        assert runner.reserve(1, 16)
        inputs = Features(head.fuse(features_TH, rows_TH[1:8]))
        out = runner.forward([Segment(1, tuple(ids[1:8]), features=inputs)], (1,))
        torch.testing.assert_close(out.taps[1], first_TH, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(out.logits_RV, F.linear(read_TH, head_DH), rtol=1e-4, atol=1e-4)

        inputs = Features(head.fuse(out.taps[1][-1:], rows_TH[8:]))
        after = runner.forward([Segment(1, tuple(ids[1:8]), Tree((ids[8],), (-1,)), 7, 7, inputs)], (1,))
        torch.testing.assert_close(after.taps[1][0], second_TH[-1], rtol=1e-4, atol=1e-4)


def test_eagles_tree_has_the_measured_shape_and_its_heads_best_tokens() -> None:
    found = random_heads(TARGET)(EAGLE, "")
    assert found is not None
    acceptance, view = found.artefact.settings["acceptance"], Sight(tokens=[3, 1, 4, 1, 5])
    features_TH = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(0))
    drafter = Eagle(Resources(VOCAB, no_runner, find_head=random_heads(TARGET)), HeadOptions())
    drafter.observe([Observation(view, NO_DRAFT, Verdict((), ()), {TARGET.num_layers: features_TH})])
    (draft,) = drafter.propose([view], [BUDGET])

    shape = best_tree(acceptance, BUDGET, len(acceptance))
    assert draft.tree.parents == shape.parents
    head = EagleHead(found.artefact.layer, VOCAB // 2)
    head.load_state_dict(dict(found.artefact.tensors))
    embedding_VH = found.embedding.bfloat16().float()  # type: ignore[union-attr]
    for node, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True)):
        path = [] if parent < 0 else [draft.tree.tokens[step] for step in _above(shape.parents, parent)]
        tokens, hidden, steps = [*view.tokens, *path], features_TH[None], Steps()
        with torch.no_grad():
            for step in range(len(path) + 1):
                rows = torch.tensor(tokens[1 + step : 5 + step])
                hidden = head.step(hidden, embedding_VH[rows][None], steps)
            best = F.linear(hidden[0, -1], found.embedding[head.draft_ids]).topk(3).indices  # type: ignore[index]
        assert draft.tree.tokens[node] == head.draft_ids[best[rank]]


def _above(parents: tuple[int, ...], node: int) -> list[int]:
    """The path from below the root down to a node."""
    return [*(_above(parents, parents[node]) if parents[node] >= 0 else []), node]
