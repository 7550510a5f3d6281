"""Tells which tokens may be sampled: top-k, then top-p, min-p and typical-p, each on what the one before left.

Every filter takes the remaining logits ``[N]``, in rising order of token id, and returns the indices of those that
stay, also rising. Other suffixes: R rows, C candidates of a row, V the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from parlay.sampling import select
from parlay.types import SamplingParams

_FIRST_GUESS = 64
_GROWTH = 8
_ROUNDING = 1e-9  # relative; far more than the rounding error of sums in different orders


def truncates(params: SamplingParams) -> bool:
    """Whether any filter is on."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0 or params.typical_p < 1


def eligible(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Ids ``[N]`` that may still be sampled, rising. Logits are finite or -inf, and at least one is finite."""
    ids: Tensor | None = None
    for keep in _filters(params):
        places = keep(logits_V if ids is None else logits_V[ids])
        ids = places if ids is None else ids[places]
    return torch.arange(logits_V.numel(), device=logits_V.device) if ids is None else ids


def goes_together(params: SamplingParams) -> bool:
    """Whether `eligible_rows` can handle rows of this request."""
    return (params.top_k > 0 or params.top_p < 1) and params.min_p == 0 and params.typical_p == 1


def eligible_rows(logits_RV: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor, Tensor]:
    """Top-k and top-p of several rows at once: candidates, which of them stay, and for which rows that is certain.

    The candidates ``[R, C]`` are ids, rising in each row. The other two are bool: ``[R, C]`` and ``[R]``. A row is not
    certain if equal logits compete for the last place, or if the probability is spread over too many tokens; `eligible`
    must then decide. Each row has a finite maximum. The result for a row does not depend on the other rows, so it is
    the same in every batch.
    """
    count = min(params.top_k or _FIRST_GUESS, logits_RV.shape[-1])
    ids_RC, sure_R = select.leading_rows(logits_RV, count)
    if params.top_p == 1:
        return ids_RC, torch.ones_like(ids_RC, dtype=torch.bool), sure_R
    best_RC = logits_RV.gather(1, ids_RC)
    order_RC = best_RC.sort(dim=1, descending=True, stable=True).indices
    weights_RC = _exp(best_RC - best_RC.amax(1, keepdim=True))
    reached_RC = weights_RC.gather(1, order_RC).cumsum(1)
    whole_R = reached_RC[:, -1] if params.top_k else torch.stack([_mass(row_V) for row_V in logits_RV])
    goal_R1 = (params.top_p * whole_R)[:, None]
    needed_R1 = (reached_RC < goal_R1).sum(1, keepdim=True) + 1
    ranked_RC = torch.arange(count, device=ids_RC.device) < needed_R1
    stay_RC = torch.empty_like(ranked_RC).scatter_(1, order_RC, ranked_RC)
    return ids_RC, stay_RC, sure_R & (needed_R1[:, 0] <= count)


def first_kept(logits_V: Tensor, tokens: Sequence[int], top_p: float) -> int | None:
    """The first of the tokens that top-p alone keeps, without sorting the row, on a CPU. Logits are as for `eligible`.

    None if it keeps none of them, or if rounding decides; `eligible` must then decide. A token stays if the tokens
    before it weigh less than ``top_p`` of the total.
    """
    if tokens[0] == int(select.argmax(logits_V[None])[1]):
        return tokens[0]
    row_V, weights_V = logits_V.numpy(), _weights(logits_V)
    goal, weight_V = top_p * weights_V.sum().item(), weights_V.numpy()
    for token in tokens:
        equal = np.flatnonzero(row_V[:token] == row_V[token])
        before = np.dot(weight_V, row_V > row_V[token]) + weight_V[equal].sum()
        if before < goal * (1 - _ROUNDING):
            return token
        if before <= goal * (1 + _ROUNDING):
            return None
    return None


def _mass(logits_V: Tensor) -> Tensor:
    """The sum of all weights, a scalar."""
    return _weights(logits_V).sum()


def _filters(params: SamplingParams) -> Iterator[Callable[[Tensor], Tensor]]:
    if params.top_k > 0:
        yield lambda logits_N: select.leading(logits_N, params.top_k).sort().values
    if params.top_p < 1:
        yield lambda logits_N: _smallest_set(logits_N, _weights(logits_N), params.top_p)
    if params.min_p > 0:
        yield lambda logits_N: select.at_least(logits_N, logits_N.amax().item() + math.log(params.min_p))
    if params.typical_p < 1:
        yield lambda logits_N: _typical(logits_N, params.typical_p)


def _weights(logits_N: Tensor) -> Tensor:
    """Probabilities up to a factor, in float64: the likeliest token has 1."""
    return _exp(logits_N - logits_N.amax())


def _exp(logits_RN: Tensor) -> Tensor:
    """The exponential in float64.

    At low temperatures most results are subnormal in float32, which is ten times slower.
    """
    return logits_RN.double().exp_()


def _smallest_set(preference_N: Tensor, weights_N: Tensor, mass: float) -> Tensor:
    """The fewest of the most preferred tokens that reach the share ``mass`` of the total weight, at least one.

    Ties go to the lower index. The running sum is in float64 and starts at the most preferred token, so it does not
    depend on how many candidates were examined.
    """
    goal = mass * weights_N.sum().item()
    count = _FIRST_GUESS
    while True:
        places_C = select.leading(preference_N, count)
        reached_C = weights_N[places_C].cumsum(0)
        if count >= len(preference_N) or reached_C[-1].item() >= goal:
            needed = int((reached_C < goal).sum()) + 1
            return places_C[:needed].sort().values
        count *= _GROWTH


def _typical(logits_N: Tensor, mass: float) -> Tensor:
    """Locally typical sampling (Meister et al. 2023): prefers tokens whose surprise is near the row's entropy."""
    weights_N = _weights(logits_N)
    total = weights_N.sum()
    surprise_N = total.log() - weights_N.log()  # infinite where the weight is 0, so never preferred
    entropy = torch.where(weights_N > 0, weights_N * surprise_N, 0.0).sum() / total
    return _smallest_set(-(surprise_N - entropy).abs(), weights_N, mass)
