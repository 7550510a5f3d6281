"""Strategies whose mark is the shape of their trees."""

from __future__ import annotations

from parlay.drafters.entries import Entry, Parameter, budget
from parlay.types import Exactness

ENTRIES = (
    Entry(
        name="sequoia",
        family="model",
        exactness=Exactness.BITS,
        training="a small model",
        needs="a model with the target's vocabulary",
        summary="A smaller model fills the tree that is best for how often each rank of its guesses was right.",
        when="verification is cheap for many rows, drafting is dear",
        reference="Chen et al. 2024 (Sequoia), arXiv:2402.12374",
        parameters={
            "model": Parameter(str, "", "draft model, by name or directory; empty: the one that goes with the target"),
            "width": Parameter(
                int, 5, "ranks of guesses that are told apart, and most children of a node", low=1, high=64
            ),
            "levels": Parameter(int, 8, "most levels of a tree", low=1, high=64),
            "level_cost": Parameter(
                float, 0.1, "what drafting a level costs, in forwards of the target", low=0, high=10
            ),
            **budget(24),
        },
        factory="parlay.drafters.draft_models.sequoia:Sequoia",
        toys=("width=3,level_cost=0",),
    ),
)
