"""Rows that a drafter trained: what they see besides, where they begin, and that no other row changes by a bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parlay import models
from parlay.compiled.library import SWITCH
from parlay.models.native import NativeRunner
from parlay.models.torch_ops import eager
from parlay.options import LoadOptions
from parlay.testing.checkpoints import save_random
from parlay.train.recipes.target import Target
from parlay.train.recipes.torch_decoder import TorchTarget
from parlay.types import Features, Join, Prefix, Segment, Tree
from tests.models.test_rows_that_run import CONFIG, TEXT, dtype, kernels, make, opened

__all__ = ["dtype", "kernels"]
LAYERS, HEADS, SIZE, HIDDEN = CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim, CONFIG.hidden_size
NODES = Tree((5, 6, 7), (-1, 0, -1))
PROBED = Tree((5, 6, 7, 0, 0, 0, 0, 0), (-1, 0, -1, -1, 3, 1, 2, 6))


def prefix(keys: int = 5) -> Prefix:
    return Prefix(torch.randn(LAYERS, 2, HEADS, keys, SIZE, generator=torch.Generator().manual_seed(1)))


def join(layer: int) -> Join:
    generator = torch.Generator().manual_seed(2)
    down_RH, up_RH = torch.randn(2, 3, HIDDEN, generator=generator) / HIDDEN**0.5
    return Join(layer, down_RH.contiguous(), up_RH.contiguous())


def features(count: int, **more: Prefix | Join | None) -> Features:
    return replace(Features(torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(3))), **more)


KINDS = [{"prefix": prefix()}, {"prefix": prefix(19)}, {"join": join(1)}, {"join": join(2), "prefix": prefix()}]


@pytest.mark.parametrize("kind", KINDS, ids=["prefix", "long prefix", "join", "both"])
def test_no_other_row_changes_and_none_depends_on_its_neighbours(
    kind: dict[str, Prefix | Join], dtype: torch.dtype
) -> None:
    runner = make(dtype)
    for name in range(5):
        opened(runner, name, TEXT, 55 if name % 2 else 0)
    pending = {name: tuple(TEXT[55 if name % 2 else 0 :]) for name in range(5)}
    given = features(5, **kind)
    out = runner.forward(
        [
            Segment(0, pending[0], PROBED, len(pending[0]) - 1, features=given),
            Segment(1, pending[1], PROBED, len(pending[1]) - 1, features=given),
        ],
        (0, LAYERS),
    )
    alone = runner.forward([Segment(2, pending[2], PROBED, len(pending[2]) - 1, features=given)])
    plain = runner.forward([Segment(3, pending[3], NODES, len(pending[3]) - 1)], (0, LAYERS))
    many, few = out.logits_RV.chunk(2)
    assert torch.equal(many, few)
    assert torch.equal(many, alone.logits_RV)
    assert torch.equal(few[:4], plain.logits_RV)
    for layer, rows_NH in plain.taps.items():
        assert torch.equal(out.taps[layer][-13:-5], rows_NH)
    lone = Tree((5, 6, 0), (-1, 0, 1))  # a chain, and one probe alone
    last = runner.forward([Segment(4, pending[4], lone, len(pending[4]) - 1, features=given.of([2]))])
    assert torch.equal(last.logits_RV, few[[0, 1, 2, 6]])


def test_more_than_a_thread_can_do_at_once_is_the_same(kernels: None) -> None:
    """Many rows and segments: phases are shared out then."""
    runner = make(torch.float32)
    given = features(3, join=join(1), prefix=prefix())
    segments = []
    for name in range(24):
        opened(runner, name, TEXT, 0)
        nodes = Tree((5, name + 1, 0, 0, 0), (-1, -1, 0, 2, 1))
        segments.append(Segment(name, tuple(TEXT), nodes, len(TEXT) - 1, features=given))
    together = runner.forward(segments).logits_RV.split(6)
    for segment, logits_RV in zip(segments, together, strict=True):
        assert torch.equal(runner.forward([segment]).logits_RV, logits_RV)


@pytest.fixture(params=["compiled", "torch", "masked"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, folder: Path) -> NativeRunner:
    if request.param != "compiled":
        monkeypatch.setenv(SWITCH, "0")
    if request.param == "masked":
        judge = eager.judge
        monkeypatch.setattr(eager, "judge", lambda *asked, **how: replace(judge(*asked, **how), form=None))
    return models.load(str(folder), LoadOptions(dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("target")
    save_random("llama", made)
    return made


IDS = [3, 1, 4, 1, 5, 9]


def said(runner: NativeRunner, given: Features) -> Tensor:
    """The logits at the root and after two probes below it."""
    runner.open(1, IDS)
    assert runner.reserve(1, 16)
    return runner.forward([Segment(1, tuple(IDS), Tree((0, 0), (-1, 0)), 5, features=given)]).logits_RV


def trained(target: Target, states: Sequence[Tensor]) -> Tensor:
    head_VH = target.tensor("lm_head.weight" if not target.tied else "model.embed_tokens.weight")
    return torch.stack([state_BTH[0, -1] for state_BTH in states]) @ head_VH.T


def embedded(target: Target) -> Tensor:
    return F.embedding(torch.tensor([IDS]), target.tensor("model.embed_tokens.weight"))


@torch.no_grad()
def test_training_sees_the_prefix_as_runners_do(runner: NativeRunner, folder: Path) -> None:
    target, given = Target.named(str(folder)), features(2, prefix=prefix())
    assert given.prefix is not None
    decoder = TorchTarget(target)
    steps = decoder.begin(torch.zeros(1, dtype=torch.int64))
    for own, states in zip(steps, given.prefix.states, strict=True):
        own.prefix = states
    states = [decoder.step(embedded(target), steps)]
    states += [decoder.step(row_H.expand(1, len(IDS), -1), steps) for row_H in given.rows_KH]
    torch.testing.assert_close(trained(target, states), said(runner, given), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_training_begins_rows_within_the_model_as_runners_do(runner: NativeRunner, folder: Path) -> None:
    target, given = Target.named(str(folder)), features(2, join=join(1))
    assert given.join is not None
    decoder = TorchTarget(target)
    steps = decoder.begin(torch.zeros(1, dtype=torch.int64))
    anchors = decoder.through(embedded(target), steps, 0, 1)
    states = [decoder.step(anchors, steps, 1)]
    begun = anchors + anchors @ given.join.down_RH.T @ given.join.up_RH
    states += [decoder.step(begun + row_H, steps, 1) for row_H in given.rows_KH]
    torch.testing.assert_close(trained(target, states), said(runner, given), rtol=1e-4, atol=1e-4)


def test_what_no_model_can_do_is_refused(runner: NativeRunner) -> None:
    for wrong, why in (
        (features(2, prefix=Prefix(torch.zeros(1, 2, HEADS, 4, SIZE))), "another model's"),
        (features(2, join=join(LAYERS)), "no row can join"),
        (features(3, join=join(1)), "rows that join are nodes"),
        (features(2, join=replace(join(1), down_RH=torch.zeros(1, 3))), "rows join by"),
        (features(2, join=replace(join(1), up_RH=join(1).up_RH.double())), "rows join by"),
        (features(2, join=replace(join(1), up_RH=join(1).up_RH.T.contiguous().T)), "rows join by"),
    ):
        with pytest.raises(ValueError, match=why):
            said(runner, wrong)
        runner.release(1)
    with pytest.raises((ValueError, IndexError)):
        runner.embed([1 << 30])
