"""The training loss: cross-entropy on the text, and for a drafter also the divergence from its teacher."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3ForCausalLM

from parlay.train.store import IGNORE

TEACHER_SHARE = 0.7
START_WEIGHTS = (8.0, 6.0, 5.0, 5.0, 4.0, 3.0)
"""What the first tokens of an answer count for: where a copy begins is one token in a hundred, and all hangs on it."""
ANSWER_WEIGHT = 2.0
"""What the others count for: a copy is lost with one token, and their share of the mean loss is small."""
Loss = Callable[[Tensor, Tensor], Tensor]


def logits_of(model: Qwen3ForCausalLM, ids: Tensor) -> Tensor:
    """Logits ``[rows, length, vocabulary]`` in the autocast dtype."""
    hidden = model.model(input_ids=ids).last_hidden_state
    logits: Tensor = model.lm_head(hidden)
    return logits


def weights_of(ids: Tensor, turns: tuple[int, int]) -> Tensor:
    """What the label of each input counts for, ``[rows, length]``: more in an answer, most where it begins.

    ``turns`` are the mark that ends a turn and the one that begins an answer.
    """
    end, begin = turns
    place = torch.arange(ids.shape[1]).expand_as(ids)
    ended, began = (torch.where(ids == mark, place, -1).cummax(dim=1).values for mark in (end, begin))
    by_distance = torch.tensor([*START_WEIGHTS, ANSWER_WEIGHT])
    weights = by_distance[(place - began).clamp(max=len(START_WEIGHTS))]
    return torch.where(began > ended, weights, 1.0)


def make_loss(model: Qwen3ForCausalLM, teacher: Qwen3ForCausalLM | None, turns: tuple[int, int]) -> Loss:
    """A function (ids, labels) -> mean loss over the labels that count; ``turns`` as `weights_of` has them."""

    def plain(ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = logits_of(model, ids).flatten(0, 1).float()
            losses = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="none")
            weights = (weights_of(ids, turns) * (labels != IGNORE)).flatten()
            return (losses * weights).sum() / weights.sum()

    def distilled(ids: Tensor, labels: Tensor) -> Tensor:
        assert teacher is not None
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                target = logits_of(teacher, ids).flatten(0, 1).float().softmax(-1)
            log_probs = logits_of(model, ids).flatten(0, 1).float().log_softmax(-1)
        # KL(teacher || student) up to the teacher's entropy, which has no gradient.
        divergence = -(target * log_probs).sum(-1).mean()
        text = F.nll_loss(log_probs, labels.flatten(), ignore_index=IGNORE)
        return TEACHER_SHARE * divergence + (1 - TEACHER_SHARE) * text

    return plain if teacher is None else distilled
