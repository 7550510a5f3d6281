"""Plain decoding, and strategies that guess tokens and correct them until they no longer change."""

from __future__ import annotations

from parlay.drafters.options import JACOBI, LOOKAHEAD, JacobiOptions, LookaheadOptions
from parlay.strategies.entry import StrategyEntry

ENTRIES: tuple[StrategyEntry, ...] = (
    StrategyEntry(
        name="none",
        family="plain",
        training="none",
        needs="nothing",
        summary="Decodes plainly, one token per step. All other strategies are compared with it.",
        when="drafting can't save time: high load, or text that nothing predicts",
    ),
    StrategyEntry(
        name=JACOBI,
        family="fixed point",
        training="none",
        needs="nothing",
        summary="Guesses a block of tokens and lets the target correct all of them at once until nothing changes.",
        when="the target was tuned for it (consistency models); otherwise only to compare",
        reference="Santilli et al. 2023, arXiv:2305.10427; for tuned targets Kou et al. 2024 (CLLM), arXiv:2403.00835",
        options=JacobiOptions,
        factory="parlay.drafters.fixed_point.jacobi:Jacobi",
    ),
    StrategyEntry(
        name=LOOKAHEAD,
        family="fixed point",
        training="none",
        needs="nothing",
        summary="Collects n-grams from parallel Jacobi iterations, and drafts those that begin with the last token.",
        when="arithmetic is idle (a GPU at batch 1), there is no draft model, and text repeats little",
        reference="Fu et al. 2024 (LADE), arXiv:2402.02057",
        options=LookaheadOptions,
        k=64,
        factory="parlay.drafters.fixed_point.lookahead:Lookahead",
        toys=("window=4,ngram=3,guesses=3",),
    ),
)
