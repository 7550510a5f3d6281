"""Rules that make one law of several models' logits, row by row.

Some rules let one of the models decide, and the row is that model's. The others write their row as the first model's
logits and a difference from them. So models that agree bit for bit give the very logits of one of them, whatever the
rule, and penalties that look at the sign of a logit still work. A row is computed alone and in float64, so that it does
not depend on the rows of other requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from parlay.options import Ensemble

_FAR = 1000.0
"""Nats below which a probability is 0 in float64, while logits in float32 still keep their order."""
CombineRow = Callable[[Sequence[Tensor]], Tensor]
"""From one row ``[V]`` of each model, in float64, to the row of all."""
ChooseModel = Callable[[Sequence[Tensor], Tensor | None], int]
"""From one row ``[V]`` of each model, in float64, to the place of the model that decides.

The second argument is the first model's final hidden state ``[H]`` there, for rules that read it."""


@dataclass(frozen=True, slots=True)
class Deferral:
    """Co-LLM's head: how likely it is that the assistant should write the next token (Shen et al. 2024,
    arXiv:2403.03870).

    ``weight_H`` and ``bias`` are float64, and the probability is sigmoid(weight_H . h + bias) for the base model's last
    hidden state h. The assistant writes where it is above ``threshold``.
    """

    weight_H: Tensor
    bias: float
    threshold: float

    def choose(self, rows: Sequence[Tensor], state_H: Tensor | None) -> int:
        """0 where the base model writes, 1 where the assistant does; 0 if there is no assistant any more."""
        assert state_H is not None, "the base model's state is read"
        return int(len(rows) > 1 and self.probability(state_H) > self.threshold)

    def probability(self, state_H: Tensor) -> float:
        return float(torch.sigmoid(torch.dot(self.weight_H.to(state_H.device), state_H.double()) + self.bias))


def combine(rule: CombineRow, logits: Sequence[Tensor]) -> Tensor:
    """Combine logits ``[R, V]`` of several models, which belong to the same texts."""
    combined_RV = torch.empty_like(logits[0])
    for row in range(len(combined_RV)):
        combined_RV[row] = rule([each_RV[row].double() for each_RV in logits])
    return combined_RV


def choose(
    rule: ChooseModel, logits: Sequence[Tensor], states_RH: Tensor | None = None
) -> tuple[Tensor, tuple[int, ...]]:
    """Take each row from the model that decides there; the second result are the places of these models."""
    chosen = tuple(
        rule([each_RV[row].double() for each_RV in logits], None if states_RH is None else states_RH[row])
        for row in range(len(logits[0]))
    )
    chosen_RV = torch.empty_like(logits[0])
    for row, model in enumerate(chosen):
        chosen_RV[row] = logits[model][row]
    return chosen_RV, chosen


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


def majority(rows: Sequence[Tensor], weights: Sequence[float]) -> int:
    """The first model among those whose likeliest token has most votes; of equal votes the earliest wins."""
    choices = [_likeliest(row_V) for row_V in rows]
    votes = [
        sum(weight for weight, other in zip(weights, choices, strict=True) if other == choice) for choice in choices
    ]
    return votes.index(max(votes))


def certainty(rows: Sequence[Tensor], weights: Sequence[float]) -> int:
    """The model that is surest: the one whose likeliest token has the highest weighted probability."""
    sure = [weight * float(log_softmax(row_V).max().exp()) for weight, row_V in zip(weights, rows, strict=True)]
    return sure.index(max(sure))


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


_Weighted = Callable[[Sequence[Tensor], Sequence[float]], Tensor]
_WEIGHTED: Mapping[str, _Weighted] = MappingProxyType({"mean": mean, "product": product})
_CHOOSING: Mapping[str, Callable[[Sequence[Tensor], Sequence[float]], int]] = MappingProxyType(
    {"majority": majority, "certainty": certainty}
)


def rule_of(ensemble: Ensemble, members: Sequence[int]) -> CombineRow:
    """The rule that an ensemble's options name, for the rows of these of its members, where it makes one law of all."""
    if ensemble.rule == "contrast":
        return partial(contrast, beta=ensemble.beta, alpha=ensemble.alpha)
    rule, weights = _WEIGHTED[ensemble.rule], [ensemble.weights[member] for member in members]
    return lambda rows: rule(rows, weights)


def choice_of(ensemble: Ensemble, deferral: Deferral | None, members: Sequence[int]) -> ChooseModel:
    """The same where it lets one of them decide; ``deferral`` is the head of the rule that has one."""
    if deferral is not None:
        return deferral.choose
    rule, weights = _CHOOSING[ensemble.rule], [ensemble.weights[member] for member in members]
    return lambda rows, _: rule(rows, weights)


def _moved(first_V: Tensor, shift_V: Tensor) -> Tensor:
    """The sum, where a token that the first model excludes stays excluded."""
    return torch.where(first_V == -math.inf, first_V, first_V + shift_V)


def _likeliest(row_V: Tensor) -> int:
    """The lowest id among those with the highest logit, as the sampler takes it."""
    return int((row_V == row_V.max()).nonzero()[0])
