"""Which models write a text together, and how one law is made of theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from parlay.options.declare import UsageError, nearest

ALPHA, BETA = 0.1, 0.5
"""Contrast's bound and strength (O'Brien and Lewis 2023, arXiv:2309.09117)."""
ENSEMBLE_RULES = ("mean", "product", "majority", "certainty", "contrast")


@dataclass(frozen=True, slots=True)
class Ensemble:
    """Other ``models`` that write with an LLM's own, and the ``rule`` that makes one law of all.

    ``mean`` is the weighted mean of the laws and ``product`` that of their logarithms. ``majority`` takes the law of
    the first model whose likeliest token has most votes, ``certainty`` that of the model that is surest of its
    likeliest token. Their ``weights`` are one for each model, the LLM's own first; by default all are equal.
    ``contrast`` moves the LLM's law away from that of one other, weaker model: log p + beta (log p - log q), among the
    tokens whose p is at least ``alpha`` times the highest.

    A request that fails in one of the models ends with an error. With ``drop_failed`` it goes on without that model,
    unless it is the LLM's own; its result then names the model and is ``lossy``.

    All models must have one tokenizer. Raises UsageError for options that do not go together.
    """

    models: Sequence[str]
    rule: str = "mean"
    weights: Sequence[float] = ()
    alpha: float = ALPHA
    beta: float = BETA
    drop_failed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "models", (self.models,) if isinstance(self.models, str) else tuple(self.models))
        members = 1 + len(self.models)
        if members == 1:
            raise UsageError("ensemble names no model: name one or more that write with the LLM's own")
        if self.rule not in ENSEMBLE_RULES:
            raise UsageError(f"ensemble rule {self.rule!r:.60}: {nearest(self.rule, ENSEMBLE_RULES)}")
        if self.rule == "contrast" and (members != 2 or self.weights):
            raise UsageError("ensemble rule contrast takes one other model, the weaker one, and no weights")
        if self.rule == "contrast" and self.drop_failed:
            raise UsageError("ensemble rule contrast needs both of its models: leave out drop_failed")
        object.__setattr__(self, "weights", tuple(self.weights) or (1.0,) * members)
        if len(self.weights) != members:
            raise UsageError(f"ensemble has {len(self.weights)} weights for {members} models: give one for each")
        if wrong := [weight for weight in self.weights if not 0 < weight < math.inf]:
            raise UsageError(f"ensemble weight {wrong[0]:g}: weights must be above 0; leave such a model out")
        if not 0 <= self.alpha <= 1:
            raise UsageError(f"contrast alpha {self.alpha:g}: must be from 0 to 1")
        if not 0 <= self.beta < math.inf:
            raise UsageError(f"contrast beta {self.beta:g}: must be at least 0")

    @property
    def guides(self) -> bool:
        """Whether requests may be guided: not where a bound excludes tokens, from which no law moves away."""
        return self.rule != "contrast" or self.alpha == 0

    def describe(self, first: str) -> str:
        """Write it in a few words, the LLM's own model first."""
        own = f"alpha={self.alpha:g}, beta={self.beta:g}" if self.rule == "contrast" else self._weighted()
        return f"{self.rule} of {', '.join((first, *self.models))} ({own})"

    def _weighted(self) -> str:
        return f"weights {', '.join(f'{weight:g}' for weight in self.weights)}"


def read_ensemble(
    models: Sequence[str], rule: str, weights: str, *, alpha: float, beta: float, drop_failed: bool
) -> Ensemble:
    """Read what flags say. Raises UsageError."""
    try:
        numbers = [float(word) for word in weights.split(",")] if weights else []
    except ValueError:
        raise UsageError(f"ensemble weights {weights!r:.60}: expected numbers with commas, such as 2,1") from None
    return Ensemble(models, rule, numbers, alpha, beta, drop_failed)
