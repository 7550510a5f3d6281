"""Mixes an n-gram language model's probabilities into the target's, and finds the weight that makes a text
likeliest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from parlay.ngrams.model import NgramModel, State
from parlay.types import FieldError

if TYPE_CHECKING:
    from torch import Tensor

_ROUNDS = 50

Numbers = npt.NDArray[np.floating]


class Mixed:
    """A logits processor: mixes an n-gram model's probabilities, with ``weight``, into the target's own.

    Give it as one of ``SamplingParams.logits_processors``. Every exact strategy decodes the same text as plain decoding
    with this processor. The n-gram model must use the target's tokenizer. Its probabilities of the end of the text and
    of unknown words are left out, and the rest is scaled to sum to 1 (`law`).

    A corpus has no end-of-text tokens. So the mixture would multiply their probability by 1 - ``weight``, and texts
    would get longer. To prevent that, name them in ``end_ids``, for example ``llm.runner.spec.eos_ids``: these tokens
    keep the target's probability.
    """

    def __init__(self, model: NgramModel, weight: float, end_ids: Collection[int] = ()) -> None:
        if not 0 <= weight < 1:
            raise FieldError("weight", f"={weight}: give at least 0 and less than 1, the n-gram model's share")
        if model.header.words:
            raise ValueError(
                "an n-gram model of words can't be mixed with a model: build one with the model's tokenizer"
            )
        self._model, self._weight, self._end_ids = model, weight, sorted(end_ids)

    def __call__(self, ids: list[int], logits_V: Tensor) -> Tensor:
        import torch  # imported here, because an n-gram model alone does not need it

        own_V = logits_V.double().softmax(-1)
        probs = law(self._model, self._model.state(ids[-self._model.order :]))
        if not len(own_V) <= 2 * len(probs) <= 2 * len(own_V):  # some LM heads have rows beyond the tokenizer's tokens
            raise ValueError(
                f"the n-gram model has {len(probs)} tokens and the target {len(own_V)}: build it with its tokenizer"
            )
        other_V = torch.zeros_like(own_V)
        other_V[: len(probs)] = torch.from_numpy(probs)
        if self._end_ids:
            kept = [each for each in self._end_ids if each < len(own_V)]
            other_V[kept] = 0
            other_V *= (1 - own_V[kept].sum()) / other_V.sum().clamp_min(1e-300)
            other_V[kept] = own_V[kept]
        mixed_V = ((1 - self._weight) * own_V + self._weight * other_V).log().to(logits_V.dtype)
        return mixed_V.masked_fill(
            logits_V == -torch.inf, -torch.inf
        )  # tokens that another processor forbids stay forbidden


def law(model: NgramModel, state: State) -> Numbers:
    """Return the probabilities ``[V]`` of all tokens after a context, scaled to sum to 1. `Mixed` mixes these in."""
    probs, _ = model.distribution(state)
    found: Numbers = probs / probs.sum()
    return found


def chances(model: NgramModel, ids: Sequence[int]) -> Numbers:
    """Return the probability by `law` of each token except the first, after the tokens before it."""
    state, found = model.state(ids[:1]), np.zeros(len(ids) - 1)
    for place, token in enumerate(ids[1:]):
        found[place] = law(model, state)[token] if token < model.header.vocab_size else 0
        state = model.next(state, token)
    return found


def best_weight(ngram: Numbers, target: Numbers) -> float:
    """Return the n-gram model's weight that makes a text likeliest, by EM (Jelinek and Mercer 1980).

    ``ngram`` and ``target`` are the probabilities of the text's tokens, from 0 to 1, under each model.
    """
    weight = 0.5
    for _ in range(_ROUNDS):
        mixed = weight * ngram + (1 - weight) * target
        weight = float(np.mean(weight * ngram / np.maximum(mixed, 1e-300)))
    return weight


def mixed_perplexity(ngram: Numbers, target: Numbers, weight: float) -> float:
    """Return the mixture's perplexity on the same tokens."""
    return float(np.exp(-np.mean(np.log(np.maximum(weight * ngram + (1 - weight) * target, 1e-300)))))
