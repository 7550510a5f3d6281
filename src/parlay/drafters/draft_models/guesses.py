"""Guesses of a draft model: tokens ranked by the request's own sampler, with probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, takewhile
from operator import mul

import torch
from torch import Tensor

from parlay.sampling.sampler import all_plain_greedy, leading_in_one_pass, ranked, take_rows
from parlay.types import NO_DRAFT, Draft, SequenceView, trees

Guess = tuple[int, float]
"""A token and the draft model's probability of it."""


def best_guesses(
    logits_RV: Tensor,
    views: Sequence[SequenceView],
    paths: Sequence[Sequence[int]],
    width: int,
    *,
    wanted: Sequence[int] | None = None,
    barred: Sequence[int] = (),
) -> list[list[Guess]]:
    """For each row, the ``width`` tokens that the sampler ranks highest, noise included, with their probabilities.

    ``wanted``: consecutive rows to rank; None: all. Logits of the tokens ``barred`` are overwritten.
    """
    if all_plain_greedy(views, paths) and (found := leading_in_one_pass(logits_RV, width, wanted, barred)) is not None:
        return found
    own_RV = logits_RV if wanted is None else take_rows(logits_RV, wanted)
    if barred:
        own_RV[:, list(barred)] = -torch.inf
    return paired(ranked(own_RV, views, paths, width), probabilities(own_RV, views))


def paired(best: Sequence[Sequence[int]], probs_RV: Tensor) -> list[list[Guess]]:
    """Combine each row's tokens with their probabilities."""
    if best and len({len(ids) for ids in best}) == 1:  # one call for all rows
        found = probs_RV.gather(1, torch.tensor(best, device=probs_RV.device)).tolist() if best[0] else best
        return [list(zip(ids, chances, strict=True)) for ids, chances in zip(best, found, strict=True)]
    return [
        list(zip(ids, probs_V[list(ids)].tolist(), strict=True)) for ids, probs_V in zip(best, probs_RV, strict=True)
    ]


def probabilities(logits_RV: Tensor, views: Sequence[SequenceView]) -> Tensor:
    """The softmax ``[R, V]`` of each row at its request's temperature, without penalties and truncation."""
    temperatures = [view.request.params.temperature or 1.0 for view in views]
    if set(temperatures) == {1.0}:
        return logits_RV.float().softmax(-1)
    return (logits_RV.float() / torch.tensor(temperatures, device=logits_RV.device)[:, None]).softmax(-1)


def falling(chances: list[float]) -> list[float]:
    """Cap each probability by the one before it: noise may have ranked a less likely token first."""
    for rank in range(1, len(chances)):
        chances[rank] = min(chances[rank], chances[rank - 1])
    return chances


def likely_chain(guesses: Sequence[Guess], min_p: float, source: str) -> Draft:
    """The draft of these tokens as a chain, up to where the path's probability falls below ``min_p``."""
    paths = accumulate((chance for _, chance in guesses), mul)
    likely = sum(1 for _ in takewhile(lambda path: path > 0 and path >= min_p, paths))
    if not likely:
        return NO_DRAFT
    tokens, scores = zip(*guesses[:likely], strict=True)
    return Draft(trees.chain_tree(tokens), sources=(source,) * likely, scores=scores)
