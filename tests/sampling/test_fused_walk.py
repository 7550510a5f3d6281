"""Walks in one launch commit what the sampler commits, or leave it to the sampler."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from parlay.compiled import triton_here
from parlay.sampling import fused_walk
from parlay.sampling.rules import SharedNoise
from parlay.testing.reference import ReferenceText
from parlay.types import Draft, Fault, NoiseKey, Request, SamplingParams, Tree, Verdict

pytest.importorskip("triton")

from parlay.sampling import walk_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 150
CHEAP = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.7, min_p=0.05),
    SamplingParams(temperature=0.7, repetition_penalty=1.3),
]
TRUNCATED = [
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(temperature=1.1, top_p=0.8),
    SamplingParams(temperature=2.0, top_k=20, top_p=0.7, min_p=0.02),
    SamplingParams(temperature=1.0, top_k=1000),
]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(triton_here.INTERPRET, "1")
    monkeypatch.setattr(fused_walk, "_BLOCK", 128)


def text_of(params: SamplingParams, seed: int) -> ReferenceText:
    request = Request(id="test", prompt=(3, seed % VOCAB), params=params, key=NoiseKey(seed))
    return ReferenceText(request, [3, seed % VOCAB, 5], 2)


def batch(chance: random.Random, variety: Sequence[SamplingParams], count: int) -> tuple[list, list, Tensor, list[int]]:
    """Random trees whose tokens are likely to be drawn, logits with equal ones among them, rows of nobody between."""
    views, drafts, rows, roots = [], [], [], []
    for _ in range(count):
        tokens, parents = list[int](), list[int]()
        logits_V = torch.randn(VOCAB).mul_(4).mul_(4).round_().div_(4)  # many are equal
        likely = logits_V.topk(4).indices.tolist()
        for _ in range(chance.randrange(24)):
            token, parent = chance.choice(likely), chance.randrange(-1, len(tokens))
            if (token, parent) not in zip(tokens, parents, strict=True):
                tokens.append(token)
                parents.append(parent)
        tree = Tree(tuple(tokens), tuple(parents))
        probes = chance.randrange(2) if tokens and len(tokens) - 1 not in parents else 0
        views.append(text_of(chance.choice(variety), chance.randrange(1000)))
        drafts.append(Draft(tree, sources=("test",) * len(tokens), probes=probes))
        roots.append(sum(len(part) for part in rows) + 1)
        rows += [torch.full((1, VOCAB), torch.nan), logits_V + torch.randn(len(tokens) + 1, VOCAB).mul_(2).round_()]
    return views, drafts, torch.cat(rows).to(DEVICE), roots


def by_sampler(views, drafts, logits_RV, roots, monkeypatch: pytest.MonkeyPatch) -> list:
    with monkeypatch.context() as patch:
        patch.setattr(fused_walk, "runs_on", lambda logits_RV: False)
        return SharedNoise().accept(views, drafts, logits_RV, roots)


def test_batches_get_the_samplers_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty batches, greedy and sampled, with penalties that the sampler takes; some with truncation."""
    torch.manual_seed(0)
    chance = random.Random(0)
    accepted, decided = 0, 0
    for number in range(20):
        given = batch(chance, CHEAP if number % 5 else TRUNCATED, 2)
        expected = by_sampler(*given, monkeypatch)
        assert SharedNoise().accept(*given) == expected
        known = [place for place, view in enumerate(given[0]) if fused_walk.takes(view)]
        if known:
            views, drafts, roots = ([each[place] for place in known] for each in (given[0], given[1], given[3]))
            decided += sum(found is not None for found in fused_walk.follow(views, drafts, given[2], roots))
        accepted += sum(len(verdict.path) for verdict in expected)
    assert accepted > 15
    assert decided > 25


def test_a_step_is_one_launch_and_two_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = dict.fromkeys(("send", "fetch", "launch"), 0)
    kernel, send, fetch = walk_kernels.walk, fused_walk._send, fused_walk._fetch

    class Counted:
        def __getitem__(self, grid):
            counts["launch"] += 1
            return kernel[grid]

    def counted(name, function):
        def call(*args):
            counts[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(walk_kernels, "walk", Counted())
    monkeypatch.setattr(fused_walk, "_send", counted("send", send))
    monkeypatch.setattr(fused_walk, "_fetch", counted("fetch", fetch))
    SharedNoise().accept(*batch(random.Random(1), CHEAP[:4], 4))
    assert counts == {"send": 1, "fetch": 1, "launch": 1}


def test_what_is_not_sure_is_left_to_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are no numbers become faults, and top-p that falls on an edge is the sampler's."""
    bad = torch.randn(3, VOCAB)
    bad[0, 7], bad[1] = torch.nan, -torch.inf
    even = torch.zeros(1, VOCAB)  # of 150 equal tokens, exactly 75 are half
    logits_RV = torch.cat((bad, even)).to(DEVICE)
    views = [text_of(SamplingParams(temperature=0), 1), text_of(SamplingParams(), 2), text_of(SamplingParams(), 3)]
    views.append(text_of(SamplingParams(top_p=0.5), 4))
    empty = [Draft(Tree((), ()), sources=()) for _ in views]
    found = fused_walk.follow(views, empty, logits_RV, [0, 1, 2, 3])
    assert [verdict is None for verdict in found] == [True, True, False, True]
    verdicts = SharedNoise().accept(views, empty, logits_RV, [0, 1, 2, 3])
    assert verdicts == by_sampler(views, empty, logits_RV, [0, 1, 2, 3], monkeypatch)
    assert [isinstance(verdict, Fault) for verdict in verdicts] == [True, True, False, False]


@pytest.mark.parametrize("wrong", ["missing", "raises", "differs"])
def test_a_kernel_that_fails_when_tried_leaves_all_to_the_sampler(
    wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object) -> list[Verdict]:
        if wrong == "raises":
            raise RuntimeError("PTX was not\nassembled")
        return [Verdict((), (1,))] * 3

    if wrong == "missing":
        monkeypatch.setattr(triton_here, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(fused_walk, "follow", broken)
    fused_walk._works.cache_clear()
    given = batch(random.Random(2), CHEAP[:2], 1)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert SharedNoise().accept(*given) == by_sampler(*given, monkeypatch)
    fused_walk._works.cache_clear()
    reason = {
        "missing": "Triton is not installed",
        "raises": "RuntimeError: PTX was not assembled",
        "differs": "ArithmeticError: it draws other tokens than the sampler",
    }
    assert [line.getMessage() for line in caplog.records] == [
        f"no walks by Triton: {reason[wrong]}; the sampler chooses tokens instead"
    ]
