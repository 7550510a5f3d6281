"""Options of the drafters that skip layers of the target. They stand apart so that reading them loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.options import Options, option

LAYER_SKIP = "layer-skip"
SWIFT = "swift"
EARLY_EXIT = "early-exit"

RATIO = 0.45
"""Share of the inner layers' halves that is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSkipOptions(Options):
    """Which layers are left out, how that is searched for, and where a draft ends."""

    attention: tuple[str, ...] = option((), "layers whose attention is left out, from 0, joined by +")
    mlp: tuple[str, ...] = option((), "layers whose MLP is left out, from 0, joined by +")
    ratio: float = option(
        RATIO, "if none are named: share of the inner attention and MLP blocks to skip", low=0, high=1
    )
    search: int = option(0, "most sets of layers to try while decoding, one per step", low=0, high=100_000)
    window: int = option(32, "search: tokens of output on which a set is tried", low=1, high=4096)
    threshold: float = option(0.8, "greedy: first value of the probability below which a draft ends", low=0, high=1)
    threshold_sampled: float = option(0.5, "the same for sampled requests", low=0, high=1)
    acceptance: float = option(0.9, "acceptance that the threshold moves towards", low=0, high=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwiftOptions(Options):
    """How the set of layers is searched for, and where a draft ends."""

    ratio: float = option(RATIO, "share of the inner attention and MLP blocks to skip", low=0, high=1)
    window: int = option(32, "tokens of output on which a set of layers is tried", low=1, high=4096)
    every: int = option(25, "one in so many sets is chosen by the estimator, the others at random", low=1, high=100_000)
    enough: float = option(0.95, "the search ends at this share of equal tokens", low=0, high=1)
    patience: int = option(300, "the search ends after so many sets without a better one", low=1)
    probes: int = option(1000, "most sets that are tried; 0: none", low=0, high=100_000)
    threshold: float = option(0.8, "probability below which a draft ends", low=0, high=1)
    width: int = option(10, "best tokens at each step that become nodes", low=1, high=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyExitOptions(Options):
    """Where drafting leaves the target, and where a draft ends."""

    exit: int = option(0, "layers that run while drafting; 0: a quarter of them", low=0, high=1024)
    threshold: float = option(0.0, "probability below which a draft ends", low=0, high=1)
