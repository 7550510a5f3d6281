"""Rules that combine the logits of several models row by row.

Some rules choose one model for a row, and take its logits. The others return the first model's logits plus a
difference. So models that agree bit for bit give exactly the logits of one of them under any rule, and penalties that
depend on the sign of a logit still work. Each row is computed alone and in float64, so it does not depend on the rows
of other requests.
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
"""Distance in nats at which a probability is 0 in float64, while float32 logits still keep their order."""
CombineRow = Callable[[Sequence[Tensor]], Tensor]
"""Combines one row ``[V]`` of each model, in float64, into one row."""
ChooseModel = Callable[[Sequence[Tensor], Tensor | None], int]
"""Chooses the index of the deciding model from one row ``[V]`` of each, in float64.

The second argument is the first model's final hidden state ``[H]`` there, for rules that need it.
"""


@dataclass(frozen=True, slots=True)
class Deferral:
    """Co-LLM's head: the probability that the assistant should write the next token (Shen et al. 2024,
    arXiv:2403.03870).

    It is sigmoid(``weight_H`` . h + ``bias``), in float64, of the base model's last hidden state h. The assistant
    writes if it is above ``threshold``.
    """

    weight_H: Tensor
    bias: float
    threshold: float

    def choose(self, rows: Sequence[Tensor], state_H: Tensor | None) -> int:
        """Return 0 if the base model writes, 1 if the assistant does; always 0 if the assistant was dropped."""
        assert state_H is not None, "the base model's state is read"
        return int(len(rows) > 1 and self.probability(state_H) > self.threshold)

    def probability(self, state_H: Tensor) -> float:
        return float(torch.sigmoid(torch.dot(self.weight_H.to(state_H.device), state_H.double()) + self.bias))


def combine(rule: CombineRow, logits: Sequence[Tensor]) -> Tensor:
    """Combine the logits ``[R, V]`` of several models for the same texts."""
    combined_RV = torch.empty_like(logits[0])
    for row in range(len(combined_RV)):
        combined_RV[row] = rule([each_RV[row].double() for each_RV in logits])
    return combined_RV


def choose(
    rule: ChooseModel, logits: Sequence[Tensor], states_RH: Tensor | None = None
) -> tuple[Tensor, tuple[int, ...]]:
    """Take each row from the model that decides there; the second result is the index of that model by row."""
    chosen = tuple(
        rule([each_RV[row].double() for each_RV in logits], None if states_RH is None else states_RH[row])
        for row in range(len(logits[0]))
    )
    chosen_RV = torch.empty_like(logits[0])
    for row, model in enumerate(chosen):
        chosen_RV[row] = logits[model][row]
    return chosen_RV, chosen


def mean(rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean of the distributions: log sum_i w_i p_i."""
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
    """The product of experts: sum_i w_i log p_i, where the weights sum to 1."""
    first_V, logprobs = rows[0], [log_softmax(row_V) for row_V in rows]
    total = math.fsum(weights)
    shift_V = torch.zeros_like(first_V)
    for weight, logprobs_V in zip(weights[1:], logprobs[1:], strict=True):
        shift_V += weight / total * (logprobs_V - logprobs[0])
    return _moved(first_V, shift_V)


def majority(rows: Sequence[Tensor], weights: Sequence[float]) -> int:
    """The first model whose likeliest token has the most votes."""
    choices = [_likeliest(row_V) for row_V in rows]
    votes = [
        sum(weight for weight, other in zip(weights, choices, strict=True) if other == choice) for choice in choices
    ]
    return votes.index(max(votes))


def certainty(rows: Sequence[Tensor], weights: Sequence[float]) -> int:
    """The model whose likeliest token has the highest weighted probability."""
    sure = [weight * float(log_softmax(row_V).max().exp()) for weight, row_V in zip(weights, rows, strict=True)]
    return sure.index(max(sure))


def contrast(rows: Sequence[Tensor], beta: float, alpha: float = 0.0) -> Tensor:
    """The first model's distribution p moved away from the second's, q: log p + beta (log p - log q).

    Tokens whose p is below ``alpha`` times the highest are put far below all others, so they appear only if a mask or a
    form allows nothing else: contrastive decoding (Li et al. 2023, arXiv:2210.15097) in the form of O'Brien and Lewis
    2023, arXiv:2309.09117. With ``alpha`` 0 it is classifier-free guidance of scale 1 + beta (Sanchez et al. 2023,
    arXiv:2306.17806).
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
    """The combining rule that an ensemble's options name, for the rows of these members."""
    if ensemble.rule == "contrast":
        return partial(contrast, beta=ensemble.beta, alpha=ensemble.alpha)
    rule, weights = _WEIGHTED[ensemble.rule], [ensemble.weights[member] for member in members]
    return lambda rows: rule(rows, weights)


def choice_of(ensemble: Ensemble, deferral: Deferral | None, members: Sequence[int]) -> ChooseModel:
    """The choosing rule that an ensemble's options name, for the rows of these members; ``deferral`` is the head of
    rule defer."""
    if deferral is not None:
        return deferral.choose
    rule, weights = _CHOOSING[ensemble.rule], [ensemble.weights[member] for member in members]
    return lambda rows, _: rule(rows, weights)


def _moved(first_V: Tensor, shift_V: Tensor) -> Tensor:
    """The sum, in which tokens that the first model excludes stay excluded."""
    return torch.where(first_V == -math.inf, first_V, first_V + shift_V)


def _likeliest(row_V: Tensor) -> int:
    """The lowest id among the tokens with the highest logit, as the sampler chooses."""
    return int((row_V == row_V.max()).nonzero()[0])
