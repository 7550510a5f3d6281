"""Strategies in which the target drafts for itself with some of its layers."""

from __future__ import annotations

from parlay.drafters.entries import Entry, Parameter, budget
from parlay.types import Exactness

_NEEDS = "a target whose layers can be skipped (the native decoder)"

ENTRIES = (
    Entry(
        name="layer-skip",
        family="self",
        exactness=Exactness.BITS,
        training="none",
        needs=_NEEDS,
        summary="The target writes ahead for itself with some of its attentions and MLPs left out.",
        when="deep targets without a draft model",
        reference="Zhang et al. 2023 (Draft & Verify), arXiv:2309.08168",
        parameters={
            "attention": Parameter(tuple, (), "layers whose attention is left out, from 0, joined by +"),
            "mlp": Parameter(tuple, (), "layers whose MLP is left out, from 0, joined by +"),
            "ratio": Parameter(
                float, 0.45, "where none are named: share of the inner layers' halves to leave out", low=0, high=1
            ),
            "search": Parameter(int, 0, "sets of layers to try while generating, one per step", low=0, high=100_000),
            "window": Parameter(int, 32, "search: tokens of output that a set is tried on", low=1, high=4096),
            "threshold": Parameter(
                float, 0.8, "greedy: first value of the probability below which a draft ends", low=0, high=1
            ),
            "threshold_sampled": Parameter(float, 0.5, "the same for sampled requests", low=0, high=1),
            "acceptance": Parameter(float, 0.9, "acceptance that the threshold moves towards", low=0, high=1),
            **budget(8),
        },
        factory="parlay.drafters.self_speculation.layer_skip:LayerSkip",
        toys=("search=12,window=4",),
    ),
    Entry(
        name="swift",
        family="self",
        exactness=Exactness.BITS,
        training="none",
        needs=_NEEDS,
        summary="The target writes ahead for itself and finds out meanwhile which of its layers it can leave out.",
        when="deep targets without a draft model, long outputs of one kind",
        reference="Xia et al. 2024 (SWIFT), arXiv:2410.06916",
        parameters={
            "ratio": Parameter(float, 0.45, "share of the inner layers' halves to leave out", low=0, high=1),
            "window": Parameter(int, 32, "tokens of output that a set of layers is tried on", low=1, high=4096),
            "every": Parameter(int, 25, "each so many sets, one is chosen by the estimator", low=1, high=100_000),
            "enough": Parameter(float, 0.95, "agreement at which the search ends", low=0, high=1),
            "patience": Parameter(int, 300, "sets in a row without a better one after which it ends", low=1),
            "probes": Parameter(int, 1000, "most sets that are tried; 0: none", low=0, high=100_000),
            "threshold": Parameter(float, 0.8, "probability below which a draft ends", low=0, high=1),
            "width": Parameter(int, 10, "best tokens at each step that become nodes", low=1, high=64),
            **budget(25),
        },
        factory="parlay.drafters.self_speculation.swift:Swift",
        toys=("window=4,every=3,width=3",),
    ),
)
