"""Which tokens stay eligible: top-k, then top-p, min-p and typical-p, each on what the one before left.

Every filter takes the remaining logits, in rising order of token id, and returns the places that stay, rising too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from parlay.sampling import select
from parlay.types import SamplingParams

_FIRST_GUESS = 64
_GROWTH = 8


def truncates(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0 or params.typical_p < 1


def eligible(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Ids that may still be sampled, rising. Logits are finite or -inf, with at least one finite."""
    ids: Tensor | None = None
    for keep in _filters(params):
        places = keep(logits_V if ids is None else logits_V[ids])
        ids = places if ids is None else ids[places]
    return torch.arange(logits_V.numel(), device=logits_V.device) if ids is None else ids


def _filters(params: SamplingParams) -> Iterator[Callable[[Tensor], Tensor]]:
    if params.top_k > 0:
        yield lambda logits: _rising(select.leading(logits, params.top_k))
    if params.top_p < 1:
        yield lambda logits: _smallest_set(logits, _weights(logits), params.top_p)
    if params.min_p > 0:
        yield lambda logits: select.at_least(logits, logits.amax().item() + math.log(params.min_p))
    if params.typical_p < 1:
        yield lambda logits: _typical(logits, params.typical_p)


def _rising(ids: Tensor) -> Tensor:
    return ids.sort().values


def _weights(logits: Tensor) -> Tensor:
    """Probabilities up to a factor; the likeliest token has 1."""
    return (logits - logits.amax()).exp_()


def _smallest_set(preference: Tensor, weights: Tensor, mass: float) -> Tensor:
    """The most preferred places, as few as reach the share ``mass`` of all weight, at least one; ties by place.

    The running sum is in float64 and starts at the most preferred place, so it does not depend on how many candidates
    were looked at.
    """
    goal = mass * weights.sum(dtype=torch.float64).item()
    count = _FIRST_GUESS
    while True:
        places = select.leading(preference, count)
        reached = weights[places].cumsum(0, dtype=torch.float64)
        if count >= len(preference) or reached[-1].item() >= goal:
            needed = int((reached < goal).sum()) + 1
            return _rising(places[:needed])
        count *= _GROWTH


def _typical(logits: Tensor, mass: float) -> Tensor:
    """Locally typical sampling (Meister et al. 2023): prefer tokens whose surprise is near the row's entropy."""
    weights = _weights(logits)
    total = weights.sum(dtype=torch.float64)
    surprise = total.log() - weights.double().log()  # infinite where the weight is 0: never preferred
    entropy = torch.where(weights > 0, weights * surprise, 0.0).sum() / total
    return _smallest_set(-(surprise - entropy).abs(), weights, mass)
