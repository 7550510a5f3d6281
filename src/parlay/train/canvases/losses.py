"""Losses of masked places and of consistency, as pure functions of logits. M places, V tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_loss(logits_MV: Tensor, labels_M: Tensor, rates_M: Tensor, places: int) -> Tensor:
    """The bound of a text's negative log-likelihood per place, from one draw of masks.

    Cross-entropy of the masked places, each divided by the rate at which it was masked, over all ``places`` that could
    have been (LLaDA, Nie et al. 2025, arXiv:2502.09992, equation 3; MDLM, Sahoo et al. 2024, arXiv:2406.07524).
    """
    each_M = F.cross_entropy(logits_MV.float(), labels_M, reduction="none")
    return (each_M / rates_M).sum() / max(places, 1)


def divergence(teacher_MV: Tensor, student_MV: Tensor) -> Tensor:
    """Mean Kullback-Leibler divergence of the student from the teacher, both logits; the teacher gets no gradient."""
    if not len(teacher_MV):
        return student_MV.sum() * 0.0
    teacher = teacher_MV.detach().float().log_softmax(-1)
    return F.kl_div(student_MV.float().log_softmax(-1), teacher, log_target=True, reduction="batchmean")


def next_token_loss(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
    """Mean cross-entropy of a text's next tokens; 0 of none."""
    return F.cross_entropy(logits_MV.float(), labels_M) if len(labels_M) else torch.zeros(())
