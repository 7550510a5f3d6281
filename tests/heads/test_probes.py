"""Trained inputs of the target: what it guesses after them is the next draft, and training sees the same numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from parlay import models
from parlay.drafters.draft_models.static_trees import best_tree
from parlay.drafters.heads.guessing_ahead import probe_counts
from parlay.drafters.heads.probes import Bita, Pass, Ppd, SpeculativeStreaming
from parlay.drafters.options import BITA, PPD, STREAMING, GroupOptions, HeadOptions, PpdOptions
from parlay.drafters.resources import Resources
from parlay.options import LoadOptions, UsageError
from parlay.testing.checkpoints import save_random
from parlay.testing.random_heads import random_heads
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.train.recipes.target import Target
from parlay.train.recipes.torch_decoder import TorchTarget
from parlay.types import Draft, Features, Observation, Segment, Tree, Verdict, trees
from tests.drafters.sight import Sight, no_runner, propose

VOCAB = 24
TARGET = ToyRunner(RandomLogits(VOCAB), VOCAB).spec
RESOURCES = Resources(VOCAB, no_runner, target=TARGET, find_head=random_heads(TARGET))
TABLE = [[0.5, 0.2, 0.1], [0.4, 0.2, 0.1]]
"""Of `random_heads`."""


def test_the_first_draft_is_probes_below_the_root_which_read_the_trained_inputs() -> None:
    held = random_heads(TARGET)(PPD, "")
    assert held is not None
    found = propose(Ppd(RESOURCES, PpdOptions()), Sight(tokens=[1, 2]), 8)
    assert found.tree.parents == (-1, 0)
    assert found.probes == 2
    assert found.inputs is not None
    torch.testing.assert_close(found.inputs.rows_KH, held.artefact.tensors["inputs_MH"])


def test_the_next_tree_holds_what_the_probes_at_the_end_of_the_walk_ranked() -> None:
    drafter, ppd = Ppd(RESOURCES, PpdOptions(probes=4)), (PPD,) * 5
    tree = Tree((7, 0, 0, 0, 0), (-1, -1, 1, 0, 3))  # one node, and two probes below the root and below it
    draft = Draft(tree, sources=ppd, scores=(0.5, 0, 0, 0, 0), probes=4)
    ranked = {0: (8, 1, 2), 1: (3, 4, 5), 2: (6, 7, 8), 3: (10, 11, 12), 4: (13, 14, 15)}
    choices = ((7, 1, 2), *(ranked[node] for node in range(5)))
    view = Sight(tokens=[1, 2, 7, 8])
    drafter.observe([Observation(view, draft, Verdict((0,), (7, 8)), top_k=choices)])
    found = trees.without_probes(propose(drafter, view, 5))
    shape = best_tree(TABLE, 5, 2)
    expected = [ranked[3] if depth == 1 else ranked[4] for depth in shape.depths]
    assert found.tree.parents == shape.parents
    assert found.tree.tokens == tuple(row[rank] for row, rank in zip(expected, shape.ranks, strict=True))
    assert found.scores == shape.scores

    elsewhere = propose(drafter, Sight(tokens=[1, 2, 7, 9]), 5)
    assert elsewhere.probes == len(elsewhere), "guesses for another text are no guesses"


def test_probes_stand_where_they_are_likeliest_to_be_read() -> None:
    likely = Draft(Tree((1, 2), (-1, 0)), sources=("", ""), scores=(0.9, 0.8))
    assert probe_counts(likely, [0.9, 0.5], 3) == [0, 1, 2], "the walk ends below the last node with .72"
    assert probe_counts(likely, [0.9, 0.5], 99) == [2, 2, 2]
    unlikely = Draft(Tree((1, 2), (-1, 0)), sources=("", ""), scores=(0.1, 0.5))
    assert probe_counts(unlikely, [0.9, 0.5], 2) == [2, 0, 0]


def test_probes_that_lose_their_node_take_their_inputs_along() -> None:
    inputs = Features(torch.arange(3.0)[:, None])
    draft = Draft(Tree((5, 6, 0, 0, 0), (-1, 0, -1, 1, 2)), sources=("",) * 5, probes=3, inputs=inputs)
    cut = trees.first(draft, 1)
    assert (cut.tree.parents, cut.probes) == ((-1, -1, 1), 2)
    assert cut.inputs is not None
    assert cut.inputs.rows_KH.flatten().tolist() == [0.0, 2.0]
    assert trees.without_probes(draft).inputs is None


@pytest.mark.parametrize("made", [Bita, SpeculativeStreaming])
def test_all_probes_hang_below_the_likeliest_nodes(made: type[Bita] | type[SpeculativeStreaming]) -> None:
    drafter = made(RESOURCES, GroupOptions(groups=2))
    first = propose(drafter, Sight(tokens=[1, 2]), 8)
    assert (first.tree.parents, first.probes) == ((-1, 0), 2)
    choices = ((7, 1, 2), (3, 4, 5), (6, 7, 8))
    drafter.observe([Observation(Sight(tokens=[1, 2, 7]), first, Verdict((), (7,)), top_k=choices)])
    found = propose(drafter, Sight(tokens=[1, 2, 7]), 3)
    assert found.tree.tokens[:3] == (3, 4, 6), "the first probe's best two, and the second's best"
    assert (found.tree.parents[3:], found.probes) == ((-1, 3, 0, 5), 4), "where the walk is likeliest to end"


def test_probes_bring_what_they_were_trained_with() -> None:
    held = {name: random_heads(TARGET)(name, "") for name in (BITA, STREAMING)}
    assert held[BITA] is not None
    assert held[STREAMING] is not None
    bita = propose(Bita(RESOURCES, GroupOptions()), Sight(tokens=[1, 2]), 8).inputs
    streams = propose(SpeculativeStreaming(RESOURCES, GroupOptions()), Sight(tokens=[1, 2]), 8).inputs
    assert bita is not None
    assert streams is not None
    assert bita.prefix is not None
    assert streams.join is not None
    assert (bita.join, streams.prefix, streams.join.layer) == (None, None, 2)
    torch.testing.assert_close(bita.prefix.states, held[BITA].artefact.tensors["prefix"])
    torch.testing.assert_close(streams.join.down_RH, held[STREAMING].artefact.tensors["down_RH"])


def test_a_prefix_for_another_target_is_refused() -> None:
    other = replace(RESOURCES, target=replace(TARGET, kv_heads=2))
    with pytest.raises(UsageError, match="trained for a model of another shape"):
        Bita(other, GroupOptions())


def test_streams_that_begin_at_no_layer_are_refused() -> None:
    other = replace(RESOURCES, target=replace(TARGET, num_layers=2))
    with pytest.raises(UsageError, match="begins at layer 2, which the target does not have"):
        SpeculativeStreaming(other, GroupOptions())


@pytest.mark.parametrize(("made", "options"), [(Ppd, PpdOptions()), (Pass, HeadOptions()), (Bita, GroupOptions())])
def test_a_target_that_reads_tokens_alone_is_refused(made: Any, options: HeadOptions) -> None:
    with pytest.raises(UsageError, match="no target"):
        made(Resources(VOCAB, no_runner, find_head=random_heads(TARGET)), options)


def test_training_sees_what_the_runner_says_after_probes(tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    target = Target.named(str(tmp_path))
    runner = models.load(str(tmp_path), LoadOptions(dtype="float32", device="cpu"))
    ids, inputs_MH = [3, 1, 4, 1, 5, 9], torch.randn(2, target.config.hidden_size)
    runner.open(1, ids)
    assert runner.reserve(1, 16)
    probes = Segment(1, tuple(ids), Tree((0, 0), (-1, 0)), 5, features=Features(inputs_MH))
    out = runner.forward([probes])

    decoder = TorchTarget(target)
    with torch.no_grad():
        steps = decoder.begin(torch.zeros(1, dtype=torch.int64))
        embedded_TH = F.embedding(torch.tensor(ids), target.tensor("model.embed_tokens.weight"))
        read = [decoder.step(embedded_TH[None], steps)[0, -1]]
        for input_H in inputs_MH:
            read.append(decoder.step(input_H.expand(1, len(ids), -1), steps)[0, -1])
        head_VH = target.tensor("lm_head.weight" if not target.tied else "model.embed_tokens.weight")
        torch.testing.assert_close(torch.stack(read) @ head_VH.T, out.logits_RV, rtol=1e-4, atol=1e-4)
