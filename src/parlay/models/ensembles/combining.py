"""Rules that make one law of several models' logits, row by row.

Each rule writes its row as the first model's logits and a difference from them. So models that agree bit for bit give
the very logits of one of them, whatever the rule, and penalties that look at the sign of a logit still work. A row is
computed alone and in float64, so that it does not depend on the rows of other requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from parlay.options import Ensemble

_FAR = 1000.0
"""Nats below which a probability is 0 in float64, while logits in float32 still keep their order."""
CombineRow = Callable[[Sequence[Tensor]], Tensor]
"""From one row ``[V]`` of each model, in float64, to the row of all."""


def combine(rule: CombineRow, logits: Sequence[Tensor]) -> Tensor:
    """Combine logits ``[R, V]`` of several models, which belong to the same texts."""
    combined_RV = torch.empty_like(logits[0])
    for row in range(len(combined_RV)):
        combined_RV[row] = rule([each_RV[row].double() for each_RV in logits])
    return combined_RV


def mean(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean of the laws: log sum_i w_i p_i."""
    first_V, logprobs = rows[0], [log_softmax(row_V) for row_V in rows]
    most_V = torch.stack(logprobs).amax(dim=0)
    finite_V = most_V.clamp(min=torch.finfo(torch.float64).min)  # where no model allows a token
    shares, total = torch.zeros_like(first_V), 0.0
    for weight, logprobs_V in zip(weights, logprobs, strict=True):
        shares += weight * (logprobs_V - finite_V).exp()
        total += weight
    base_V = torch.where(most_V == logprobs[0], first_V, most_V + first_V.logsumexp(0))
    return base_V + (shares / total).log()


def product(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The product of experts: sum_i w_i log p_i, the weights' sum being 1."""
    first_V, logprobs = rows[0], [log_softmax(row_V) for row_V in rows]
    total = math.fsum(weights)
    shift_V = torch.zeros_like(first_V)
    for weight, logprobs_V in zip(weights[1:], logprobs[1:], strict=True):
        shift_V += weight / total * (logprobs_V - logprobs[0])
    return _moved(first_V, shift_V)


def majority(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The row of the first model among those whose likeliest token has most votes; of equal votes the earliest wins."""
    choices = [_likeliest(row_V) for row_V in rows]
    votes = [
        sum(weight for weight, other in zip(weights, choices, strict=True) if other == choice) for choice in choices
    ]
    return rows[votes.index(max(votes))]


def certainty(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The row of the model that is surest: the one whose likeliest token has the highest weighted probability."""
    sure = [weight * float(log_softmax(row_V).max().exp()) for weight, row_V in zip(weights, rows, strict=True)]
    return rows[sure.index(max(sure))]


def contrast(rows: Sequence[Tensor], beta: float, alpha: float = 0.0) -> Tensor:
    """The first model's law, moved away from the second's: log p + beta (log p - log q).

    Tokens whose p is less than ``alpha`` times the highest lie far below all others, so that they come only where a
    mask or a form leaves no other: contrastive decoding (Li et al. 2023,
    arXiv:2210.15097) in the form of O'Brien and Lewis 2023, arXiv:2309.09117. With ``alpha`` 0 it is classifier-free
    guidance of scale 1 + beta (Sanchez et al. 2023, arXiv:2306.17806).
    """
    first_V, second_V = rows
    logprobs_V = log_softmax(first_V)
    moved_V = _moved(first_V, beta * (logprobs_V - log_softmax(second_V)))
    if alpha <= 0:
        return moved_V
    bound = logprobs_V.max() + math.log(alpha)
    return torch.where(logprobs_V < bound, first_V - _FAR, moved_V)


def log_softmax(row_V: Tensor) -> Tensor:
    """Natural-log probabilities of a row."""
    return row_V - row_V.logsumexp(0)


_WEIGHTED: Mapping[str, Callable[[Sequence[Tensor], Sequence[float]], Tensor]] = MappingProxyType(
    {"mean": mean, "product": product, "majority": majority, "certainty": certainty}
)


def rule_of(ensemble: Ensemble, members: Sequence[int]) -> CombineRow:
    """The rule that an ensemble's options name, for the rows of these of its members."""
    if ensemble.rule == "contrast":
        return partial(contrast, beta=ensemble.beta, alpha=ensemble.alpha)
    rule, weights = _WEIGHTED[ensemble.rule], [ensemble.weights[member] for member in members]
    return lambda rows: rule(rows, weights)


def _moved(first_V: Tensor, shift_V: Tensor) -> Tensor:
    """The sum, where a token that the first model excludes stays excluded."""
    return torch.where(first_V == -math.inf, first_V, first_V + shift_V)


def _likeliest(row_V: Tensor) -> int:
    """The lowest id among those with the highest logit, as the sampler takes it."""
    return int((row_V == row_V.max()).nonzero()[0])
