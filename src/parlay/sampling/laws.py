"""The law of the next token as probabilities, for rules and drafters that compare laws or draw from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from parlay.sampling import select
from parlay.sampling.processors import process
from parlay.types import View

Vector: TypeAlias = "np.ndarray[Any, Any]"
"""``[V]`` probabilities or weights: float64, or `fractions.Fraction` where laws are proved by enumeration."""


def law(logits_V: Tensor, view: View, path: Sequence[int]) -> Tensor:
    """Float64 ``[V]``: what the request samples the token after ``path`` from; one-hot if it is greedy.

    Raises ParlayError like `process`.
    """
    scores_V = process(logits_V, view, path)
    if not view.request.params.greedy:
        return scores_V.double().softmax(-1)
    law_V = torch.zeros_like(scores_V, dtype=torch.float64)
    law_V[select.argmax(scores_V[None])[1]] = 1
    return law_V


def soft_law(logits_V: Tensor, view: View, path: Sequence[int]) -> Tensor:
    """The same, but for greedy requests the softmax of the processed logits."""
    return process(logits_V, view, path).double().softmax(-1)


def pick(weights: Vector, uniform: float) -> int:
    """The token at this share of all weight, in order of id; never one without weight, of which there must be some."""
    reached = weights.cumsum()
    place = int(reached.searchsorted(uniform * reached[-1], side="right"))
    if place < len(weights):
        return place
    return int(np.flatnonzero(weights)[-1])  # the product was rounded up to the whole
