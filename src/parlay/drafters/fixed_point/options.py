"""Options of the drafters that iterate. They stand apart so that reading them loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.options import Options, option

JACOBI = "jacobi"
LOOKAHEAD = "lookahead"


@dataclass(frozen=True, slots=True, kw_only=True)
class JacobiOptions(Options):
    """How far is guessed, and with what."""

    variant: str = option(
        "parallel",
        "how far is guessed: as the budget allows, to the end of a block, or in blocks until bound",
        choices=("parallel", "block", "hybrid"),
    )
    block: int = option(8, "block, hybrid: tokens that are solved together", low=2, high=1024)
    bound: int = option(128, "hybrid: output tokens after which decoding is plain", low=1)
    guess: str = option("pad", "first guess of a token", choices=("pad", "last", "prompt"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadOptions(Options):
    """Sizes of the window and of the pool of n-grams."""

    window: int = option(5, "columns of the window (W); 0: n-grams of the text alone", low=0, high=128)
    ngram: int = option(4, "tokens of an n-gram (N); the window has one row less", low=2, high=32)
    guesses: int = option(5, "n-grams verified at once, and kept per first token (G)", low=0, high=128)
    copy: bool = option(True, "take n-grams from prompt and output, too")
