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
        factory="parlay.drafters.jacobi:Jacobi",
    ),
)
