"""Next-token distributions, for rules and drafters that compare or draw, and log-probabilities for users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from parlay.sampling import select
from parlay.sampling.processors import process
from parlay.types import SequenceView, TokenLogprobs

Vector: TypeAlias = "np.ndarray[Any, Any]"
"""``[V]`` probabilities or weights: float64, or `fractions.Fraction` in tests that enumerate all outcomes."""


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
    """Like `distribution`, but also for greedy requests the softmax of the processed logits."""
    return process(logits_V, view, path).double().softmax(-1)


def pick(weights: Vector, uniform: float) -> int:
    """The token at which the running sum of weights, by id, exceeds the share ``uniform`` of their total.

    It never has weight 0. At least one weight must be positive.
    """
    reached = weights.cumsum()
    place = int(reached.searchsorted(uniform * reached[-1], side="right"))
    if place < len(weights):
        return place
    return int(np.flatnonzero(weights)[-1])  # rounding made the product equal to the total


def token_logprobs(logits_V: Tensor, token: int, top: int) -> TokenLogprobs:
    """Log-probability and rank of ``token``, and the ``top`` most likely tokens. Ties rank by id, lowest first.

    Log-probabilities are natural logarithms of the softmax, in float32.
    """
    logprobs_V = torch.log_softmax(logits_V, -1, dtype=torch.float32)
    logit = logits_V[token]
    better = (logits_V > logit).sum() + (logits_V[:token] == logit).sum()
    best = select.leading(logits_V, top)
    alternatives = tuple(zip(best.tolist(), logprobs_V[best].tolist(), strict=True))
    return TokenLogprobs(token, logprobs_V[token].item(), int(better) + 1, alternatives)


def prompt_token_logprobs(logits_RV: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """`token_logprobs` of prompt tokens: row r, of the token before, predicts ``tokens[r]``."""
    return [token_logprobs(row_V, token, top) for row_V, token in zip(logits_RV, tokens, strict=True)]


def row_logprobs(
    logits_RV: Tensor, view: SequenceView, paths: Sequence[Sequence[int]], tokens: Sequence[int], top: int
) -> list[TokenLogprobs]:
    """`token_logprobs` of chosen tokens: row r follows ``view.tokens`` and then ``paths[r]``.

    They come from the raw logits or, if the request says so, from the processed ones.
    """
    if view.request.params.logprobs_mode == "processed":
        rows = [process(row_V, view, path) for row_V, path in zip(logits_RV, paths, strict=True)]
        logits_RV = torch.stack(rows) if rows else logits_RV
    return [token_logprobs(row_V, token, top) for row_V, token in zip(logits_RV, tokens, strict=True)]
