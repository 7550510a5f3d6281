"""The distribution of the next token, for rules and drafters that compare distributions or draw from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from parlay.sampling import select
from parlay.sampling.processors import process
from parlay.types import SequenceView

Vector: TypeAlias = "np.ndarray[Any, Any]"
"""``[V]`` probabilities or weights: float64, or `fractions.Fraction` in tests that enumerate every outcome."""


def distribution(logits_V: Tensor, view: SequenceView, path: Sequence[int]) -> Tensor:
    """The distribution ``[V]`` that the token after ``path`` is drawn from, in float64; one-hot for a greedy request.

    Raises ParlayError like `process`.
    """
    scores_V = process(logits_V, view, path)
    if not view.request.params.greedy:
        return scores_V.double().softmax(-1)
    probs_V = torch.zeros_like(scores_V, dtype=torch.float64)
    probs_V[select.argmax(scores_V[None])[1]] = 1
    return probs_V


def soft_distribution(logits_V: Tensor, view: SequenceView, path: Sequence[int]) -> Tensor:
    """Like `distribution`, but for greedy requests too the softmax of the processed logits."""
    return process(logits_V, view, path).double().softmax(-1)


def pick(weights: Vector, uniform: float) -> int:
    """The token at which the running sum of weights, by id, passes the share ``uniform`` of the total.

    Never a token without weight. At least one token must have some.
    """
    reached = weights.cumsum()
    place = int(reached.searchsorted(uniform * reached[-1], side="right"))
    if place < len(weights):
        return place
    return int(np.flatnonzero(weights)[-1])  # rounding made the product the total
