"""Strategies that choose the shape of their trees."""

from __future__ import annotations

from parlay.drafters.draft_models.options import SEQUOIA, SequoiaOptions
from parlay.strategies.entry import StrategyEntry

ENTRIES = (
    StrategyEntry(
        name=SEQUOIA,
        family="model",
        training="a small model",
        needs="a model with the target's vocabulary",
        summary="A smaller model fills the tree shape that is best for the measured acceptance of its guesses by rank.",
        when="verifying many rows is cheap, and drafting is expensive",
        reference="Chen et al. 2024 (Sequoia), arXiv:2402.12374",
        options=SequoiaOptions,
        k=24,
        factory="parlay.drafters.draft_models.sequoia:Sequoia",
        toys=("width=3,level_cost=0",),
    ),
)
