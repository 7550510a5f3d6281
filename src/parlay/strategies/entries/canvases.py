"""Diffusion models: the strategy that fills canvases, and the options of its selectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from parlay.options import Options, option
from parlay.strategies.entry import StrategyEntry
from parlay.types import Exactness

DENOISE = "denoise"

OWN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "threshold": ("threshold",),
        "confidence": ("k",),
        "margin": ("k",),
        "entropy": ("k",),
        "random": ("k",),
        "left-to-right": ("k",),
        "factor": ("factor",),
        "entropy-bound": ("bound",),
        "entropy-distance": ("bound", "distance"),
        "kl-stability": ("threshold", "kl", "history"),
        "credit": ("threshold", "alpha", "gamma", "decay"),
        "joint-threshold": ("threshold", "edit_threshold", "edit_steps"),
        "mask-predict": ("steps",),
        "renoise": ("bound", "max_denoising_steps", "t_max", "t_min", "stability_threshold", "confidence_threshold"),
        "ctc": (),
        "greedy-path": (),
        "lookahead-path": ("beta",),
        "viterbi-path": ("penalty",),
    }
)
"""The options that each selector reads."""

READS: Mapping[str, str] = MappingProxyType(
    {"renoise": "noise", "ctc": "frames", "greedy-path": "graph", "lookahead-path": "graph", "viterbi-path": "graph"}
)
"""How some selectors read a canvas; all others read it place by place."""


TEMPERATURES = ("t_max", "t_min")
"""Selectors' options for the temperatures by which logits are divided."""

WHOLE = frozenset({"mask-predict", "joint-threshold", "renoise"})
"""Selectors that may change any place until the whole canvas is decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoiseOptions(Options):
    """Options of denoising: which places of a canvas are decided in each step."""

    selector: str = option("threshold", "how the places that a step decides are chosen", choices=tuple(OWN))
    threshold: float = option(
        0.9,
        "threshold, kl-stability, credit, joint-threshold: probability at which a place is decided; 0: any, 1: "
        "certainty",
        low=0,
        high=1,
    )
    k: int = option(1, "confidence, margin, entropy, random, left-to-right: places decided in a step", low=1, high=1024)
    factor: float = option(
        1.0, "factor: decide n places while (n + 1) * (1 - probability) is below this", low=0, high=1024
    )
    bound: float = option(
        0.1,
        "entropy-bound, renoise: maximum sum of the decided places' entropies, without the last one, in nats; "
        "entropy-distance: entropy below which a place is decided",
        low=0,
        high=1024,
    )
    distance: float = option(
        0.02, "entropy-distance: nats that are added for each place after the first open one", low=0, high=1024
    )
    kl: float = option(
        0.01, "kl-stability: a distribution is stable if it moved by fewer nats than this", low=0, high=1024
    )
    history: int = option(2, "kl-stability: steps for which it must be stable", low=1, high=64)
    alpha: float = option(0.7, "credit: weight of the credit of earlier guesses", low=0, high=64)
    gamma: float = option(0.2, "credit: exponent of the probability that is credited", low=0, high=64)
    decay: float = option(0.8, "credit: share of the credit that is left a step later", low=0, high=1)
    edit_threshold: float = option(
        0.9, "joint-threshold: probability at which another token replaces a decided one", low=0, high=1
    )
    edit_steps: int = option(
        16, "joint-threshold: forwards that may replace tokens once all places are decided", low=0, high=1024
    )
    steps: int = option(10, "mask-predict: forwards of a canvas", low=1, high=1024)
    max_denoising_steps: int = option(48, "renoise: maximum forwards of a canvas", low=1, high=1024)
    t_max: float = option(0.8, "renoise: temperature of a canvas's first forward", low=0.01, high=64)
    t_min: float = option(0.4, "renoise: temperature that later forwards approach", low=0.01, high=64)
    stability_threshold: int = option(
        1, "renoise: a canvas is done if its likeliest tokens stayed the same for so many forwards", low=0, high=1024
    )
    confidence_threshold: float = option(
        0.005, "renoise: a canvas is done only if its mean entropy is also below so many nats", low=0, high=1024
    )
    beta: float = option(1.0, "lookahead-path: weight of a token relative to the transition to it", low=0, high=64)
    penalty: float = option(1.0, "viterbi-path: a path's score is divided by its length to this power", low=0, high=64)
    lengths: int = option(1, "answer lengths to try, if the model predicts the length", low=1, high=64)
    canvas: int = option(64, "places of a canvas, if the model does not fix them", low=1, high=1024)
    cache: str = option(
        "exact",
        "for models whose rows all see each other. exact: compute all rows at each step; stale: use the rows of other "
        "blocks as they were when the block began, which changes the text",
        choices=("exact", "stale"),
    )
    block: int = option(0, "decide so many places before the next ones; 0: the whole canvas", low=0, high=1024)


ENTRIES: tuple[StrategyEntry, ...] = (
    StrategyEntry(
        name=DENOISE,
        family="diffusion",
        exactness=Exactness.LOSSY,
        training="none",
        needs="a diffusion model as the target, or a translator that fills masked places",
        summary="Fills masked places in any order, several in a step. The selector decides the text.",
        when="the target is a diffusion model or a translator that can't write token by token",
        reference="Nie et al. 2025 (LLaDA), arXiv:2502.09992; Wu et al. 2025 (Fast-dLLM), arXiv:2505.22618",
        options=DenoiseOptions,
        rules=(),
        toys=(),
        selects=True,
    ),
)
