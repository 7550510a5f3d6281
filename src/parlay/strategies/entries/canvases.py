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
"""Selectors for models whose canvas is not read place by place, and how they read it."""


TEMPERATURES = ("t_max", "t_min")
"""Options of selectors for the temperatures by which logits are divided."""

WHOLE = frozenset({"mask-predict", "joint-threshold", "renoise"})
"""Selectors that may change a place until the whole canvas is decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoiseOptions(Options):
    """Options of denoising: which places of a canvas are decided in each step."""

    selector: str = option("threshold", "which places are decided in a step", choices=tuple(OWN))
    threshold: float = option(
        0.9,
        "threshold, kl-stability, credit, joint-threshold: probability from which a place is decided; 0: all, 1: "
        "certain",
        low=0,
        high=1,
    )
    k: int = option(1, "confidence, margin, entropy, random, left-to-right: places decided in a step", low=1, high=1024)
    factor: float = option(1.0, "factor: n places while (n + 1) * (1 - probability) is below this", low=0, high=1024)
    bound: float = option(
        0.1,
        "entropy-bound, renoise: nats that the decided places but the last may sum to; entropy-distance: nats below "
        "which a place is decided",
        low=0,
        high=1024,
    )
    distance: float = option(
        0.02, "entropy-distance: nats that each place after the first open one adds", low=0, high=1024
    )
    kl: float = option(0.01, "kl-stability: nats below which a distribution has not moved", low=0, high=1024)
    history: int = option(2, "kl-stability: steps for which it must not have moved", low=1, high=64)
    alpha: float = option(0.7, "credit: weight of the credit of earlier guesses", low=0, high=64)
    gamma: float = option(0.2, "credit: power of the probability that is credited", low=0, high=64)
    decay: float = option(0.8, "credit: what is left of it a step later", low=0, high=1)
    edit_threshold: float = option(
        0.9, "joint-threshold: probability from which another token replaces one that was decided", low=0, high=1
    )
    edit_steps: int = option(
        16, "joint-threshold: forwards that may replace tokens after all places were decided", low=0, high=1024
    )
    steps: int = option(10, "mask-predict: forwards of a canvas", low=1, high=1024)
    max_denoising_steps: int = option(48, "renoise: most forwards of a canvas", low=1, high=1024)
    t_max: float = option(0.8, "renoise: temperature of a canvas's first forward", low=0.01, high=64)
    t_min: float = option(0.4, "renoise: temperature that its forwards approach", low=0.01, high=64)
    stability_threshold: int = option(
        1, "renoise: forwards for which the likeliest tokens stayed the same in a canvas that is done", low=0, high=1024
    )
    confidence_threshold: float = option(
        0.005, "renoise: nats of mean entropy that such a canvas stays below", low=0, high=1024
    )
    beta: float = option(1.0, "lookahead-path: weight of a token beside the way to it", low=0, high=64)
    penalty: float = option(1.0, "viterbi-path: power of the length that a path's score is divided by", low=0, high=64)
    lengths: int = option(1, "lengths of an answer that are tried, where the model guesses one", low=1, high=64)
    canvas: int = option(64, "places of a canvas, for models that leave it open", low=1, high=1024)
    cache: str = option(
        "exact",
        "what is cached of a text whose rows all see each other. exact: nothing; stale: its rows as they were when the "
        "block began, which changes the text",
        choices=("exact", "stale"),
    )
    block: int = option(0, "places that are decided before those after them; 0: the whole canvas", low=0, high=1024)


ENTRIES: tuple[StrategyEntry, ...] = (
    StrategyEntry(
        name=DENOISE,
        family="diffusion",
        exactness=Exactness.LOSSY,
        training="none",
        needs="a diffusion model as the target, or a translator that fills canvases",
        summary="Fills masked places in any order, several in a step. The text is the model's own.",
        when="the target is a diffusion model or a translator that can't write token by token",
        reference="Nie et al. 2025 (LLaDA), arXiv:2502.09992; Wu et al. 2025 (Fast-dLLM), arXiv:2505.22618",
        options=DenoiseOptions,
        rules=(),
        toys=(),
        selects=True,
    ),
)
