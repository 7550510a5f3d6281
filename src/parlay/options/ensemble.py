"""Options for models that write a text together, or with a datastore: which ones, and how they are combined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from parlay.options.declare import nearest
from parlay.types import FieldError

ALPHA, BETA = 0.1, 0.5
"""Bound and strength of contrast (O'Brien and Lewis 2023, arXiv:2309.09117)."""
NEIGHBOURS, NEST_ALPHA, NEST_TAU = 64, 0.3, 0.1
MOST_NEIGHBOURS = 4096
ENSEMBLE_RULES = ("mean", "product", "majority", "certainty", "contrast", "defer")
_CHOOSING = ("majority", "certainty", "defer")
_OTHERS = {"contrast": "the weaker one", "defer": "the assistant"}


@dataclass(frozen=True, slots=True)
class Ensemble:
    """Other ``models`` that write with an LLM's own, and the ``rule`` that combines their distributions.

    ``mean`` is the weighted mean of the distributions, ``product`` that of their logarithms. ``majority`` takes the
    distribution of the first model whose likeliest token has most votes, ``certainty`` that of the model that gives its
    likeliest token the highest probability. ``weights`` has one weight for each model, the LLM's own first; by default
    all are equal. ``contrast`` takes log p + beta (log p - log q), for the LLM's p and the q of one weaker model, among
    the tokens whose p is at least ``alpha`` times the highest. ``defer`` (Co-LLM) lets one other model write the tokens
    to which a head gives a probability above ``threshold``, and the LLM all others. ``head`` is a folder of `parlay
    train defer`; ``threshold=None`` uses the threshold in that folder.

    A request that fails in one of the models ends with an error. With ``drop_failed`` it goes on without that model,
    unless it is the LLM's own; its result then names the model and is ``lossy``. In the same way, a text goes on
    without a model whose forward takes longer than ``deadline`` seconds; prefill has no deadline.

    The text is in the tokens of the LLM's own model. A model with another tokenizer reads the same characters, and can
    only choose tokens that both have; ``defer`` needs one tokenizer. Raises UsageError for options that do not go
    together.
    """

    models: Sequence[str]
    rule: str = "mean"
    weights: Sequence[float] = ()
    alpha: float = ALPHA
    beta: float = BETA
    drop_failed: bool = False
    deadline: float | None = None
    head: str = ""
    threshold: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "models", (self.models,) if isinstance(self.models, str) else tuple(self.models))
        members = 1 + len(self.models)
        if members == 1:
            raise FieldError("ensemble", "must name one or more other models")
        if self.rule not in ENSEMBLE_RULES:
            raise FieldError("ensemble rule", f"{self.rule!r:.60}: {nearest(self.rule, ENSEMBLE_RULES)}")
        if self.rule in _OTHERS and (members != 2 or self.weights):
            raise FieldError(
                "ensemble rule", f"{self.rule} needs one other model, {_OTHERS[self.rule]}, and no weights"
            )
        if self.rule == "contrast" and (self.drop_failed or self.deadline is not None):
            raise FieldError("ensemble rule", "contrast can't be used with drop_failed and deadline: remove them")
        if self.deadline is not None and not 0 < self.deadline < math.inf:
            raise FieldError("ensemble deadline", f"must be above 0 seconds, got {self.deadline:g}")
        object.__setattr__(self, "weights", tuple(self.weights) or (1.0,) * members)
        if len(self.weights) != members:
            raise FieldError(
                "ensemble weights", f"must be {members} numbers, one for each model, got {len(self.weights)}"
            )
        if wrong := [weight for weight in self.weights if not 0 < weight < math.inf]:
            raise FieldError(
                "ensemble weights", f"must be above 0, got {wrong[0]:g}: remove that model, or raise its weight"
            )
        if not 0 <= self.alpha <= 1:
            raise FieldError("contrast alpha", f"must be between 0 and 1, got {self.alpha:g}")
        if not 0 <= self.beta < math.inf:
            raise FieldError("contrast beta", f"must be at least 0, got {self.beta:g}")
        self._check_deferral()

    def _check_deferral(self) -> None:
        """Check the options of rule ``defer``. Raises UsageError."""
        if self.rule == "defer" and not self.head:
            raise FieldError(
                "ensemble rule", "defer needs a head: train one with parlay train defer, and name its folder"
            )
        if self.rule != "defer" and (self.head or self.threshold is not None):
            raise FieldError("ensemble head", f"and threshold work only with rule defer, not {self.rule}: remove them")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise FieldError("ensemble threshold", f"must be between 0 and 1, got {self.threshold:g}")

    @property
    def files(self) -> tuple[str, ...]:
        """Names of further files that the text depends on: the head's weights and settings."""
        return (f"{self.head}/model.safetensors", f"{self.head}/config.json") if self.head else ()

    @property
    def chooses(self) -> bool:
        """Whether a single model decides on each token, so that its source can be named."""
        return self.rule in _CHOOSING

    @property
    def guides(self) -> bool:
        """Whether requests may use guidance: not if ``alpha`` excludes tokens, which guidance could not bring back."""
        return self.rule != "contrast" or self.alpha == 0

    def describe(self, first: str) -> str:
        """Describe the ensemble in a few words, the LLM's own model first."""
        descriptions = {
            "contrast": f"alpha={self.alpha:g}, beta={self.beta:g}",
            "defer": f"head {Path(self.head).name}"
            + ("" if self.threshold is None else f", threshold {self.threshold:g}"),
        }
        own = descriptions.get(self.rule, f"weights {', '.join(f'{weight:g}' for weight in self.weights)}")
        return f"{self.rule} of {', '.join((first, *(Path(model).name for model in self.models)))} ({own})"


def read_weights(text: str) -> list[float]:
    """Parse the weights of a command-line flag. Raises UsageError."""
    try:
        return [float(word) for word in text.split(",")] if text else []
    except ValueError:
        raise FieldError("ensemble weights", f"must be numbers joined by commas, as in 2,1, got {text!r:.60}") from None


@dataclass(frozen=True, slots=True)
class Nest:
    """A ``datastore``, built with hidden states of an LLM's model, that writes together with this model.

    For each token the ``neighbours`` stored states nearest to the model's hidden state are looked up, and the
    distribution of the tokens after them is mixed with the model's. The model's weight is sigmoid((r - alpha) / tau),
    where r is the smallest squared distance over the largest. A lower alpha raises the model's weight (NEST, Li et al.
    2024, arXiv:2405.19325). Raises UsageError for numbers out of range.
    """

    datastore: str
    neighbours: int = NEIGHBOURS
    alpha: float = NEST_ALPHA
    tau: float = NEST_TAU

    guides: ClassVar[bool] = False
    models: ClassVar[tuple[str, ...]] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """Names of further files that the text depends on: the states' header, which has all checksums."""
        return (f"{self.datastore}.states/header.json",)

    def __post_init__(self) -> None:
        if not 1 <= self.neighbours <= MOST_NEIGHBOURS:
            raise FieldError("nest neighbours", f"must be between 1 and {MOST_NEIGHBOURS}, got {self.neighbours}")
        if not -math.inf < self.alpha < math.inf:
            raise FieldError("nest alpha", f"must be a finite number, got {self.alpha:g}")
        if not 0 < self.tau < math.inf:
            raise FieldError("nest tau", f"must be above 0, got {self.tau:g}")

    def describe(self, first: str) -> str:
        """Describe it in a few words, the LLM's own model first."""
        settings = f"{self.neighbours} neighbours, alpha={self.alpha:g}, tau={self.tau:g}"
        return f"{first} with {Path(self.datastore).name} ({settings})"
