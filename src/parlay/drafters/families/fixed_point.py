"""Strategies that guess all tokens at once and iterate: Jacobi, lookahead."""

from __future__ import annotations

from parlay.drafters.entries import Entry, Parameter, budget
from parlay.types import Exactness

ENTRIES = (
    Entry(
        name="jacobi",
        family="fixed point",
        exactness=Exactness.BITS,
        training="none",
        needs="nothing",
        summary="Guesses a block of tokens and lets the target correct all of them at once until nothing changes.",
        when="models tuned for it (consistency models); a yardstick otherwise",
        reference="Santilli et al. 2023, arXiv:2305.10427; for tuned targets Kou et al. 2024 (CLLM), arXiv:2403.00835",
        parameters={
            "variant": Parameter(
                str,
                "parallel",
                "how far is guessed: as the budget allows, to the end of a block, or in blocks until bound",
                choices=("parallel", "block", "hybrid"),
            ),
            "block": Parameter(int, 8, "block, hybrid: tokens that are solved together", low=2, high=1024),
            "bound": Parameter(int, 128, "hybrid: output tokens after which decoding is plain", low=1),
            "guess": Parameter(str, "pad", "first guess of a token", choices=("pad", "last", "prompt")),
            **budget(16),
        },
        factory="parlay.drafters.fixed_point.jacobi:Jacobi",
    ),
    Entry(
        name="lookahead",
        family="fixed point",
        exactness=Exactness.BITS,
        training="none",
        needs="nothing",
        summary="Collects n-grams from a window of parallel Jacobi iterations; verifies them when their token comes.",
        when="idle arithmetic (a GPU at batch 1), no draft model, text that repeats little",
        reference="Fu et al. 2024 (LADE), arXiv:2402.02057",
        parameters={
            "window": Parameter(int, 5, "columns of the window (W); 0: n-grams of the text alone", low=0, high=128),
            "ngram": Parameter(int, 4, "tokens of an n-gram (N); the window has one row less", low=2, high=32),
            "guesses": Parameter(int, 5, "n-grams verified at once, and kept per first token (G)", low=0, high=128),
            "copy": Parameter(bool, True, "take n-grams from prompt and output, too"),
            **budget(64),
        },
        factory="parlay.drafters.fixed_point.lookahead:Lookahead",
        toys=("window=4,ngram=3,guesses=3",),
    ),
)
