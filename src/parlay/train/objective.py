"""The training loss: cross-entropy on the text, and for a student also the divergence from its teacher."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3ForCausalLM

TEACHER_SHARE = 0.7
Loss = Callable[[Tensor, Tensor], Tensor]


def logits_of(model: Qwen3ForCausalLM, ids_BT: Tensor) -> Tensor:
    """Logits ``[B, T, V]`` in the autocast dtype."""
    hidden = model.model(input_ids=ids_BT).last_hidden_state
    logits: Tensor = model.lm_head(hidden)
    return logits


def make_loss(model: Qwen3ForCausalLM, teacher: Qwen3ForCausalLM | None) -> Loss:
    """A function (ids_BT, labels_BT) -> mean loss. B rows, T tokens of each."""

    def plain(ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = logits_of(model, ids_BT).flatten(0, 1).float()
            return F.cross_entropy(logits, labels_BT.flatten())

    def distilled(ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        assert teacher is not None
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                target = logits_of(teacher, ids_BT).flatten(0, 1).float().softmax(-1)
            log_probs = logits_of(model, ids_BT).flatten(0, 1).float().log_softmax(-1)
        # KL(teacher || student) up to the teacher's entropy, which has no gradient.
        divergence = -(target * log_probs).sum(-1).mean()
        text = F.nll_loss(log_probs, labels_BT.flatten())
        return TEACHER_SHARE * divergence + (1 - TEACHER_SHARE) * text

    return plain if teacher is None else distilled


@torch.inference_mode()
def text_loss(model: Qwen3ForCausalLM, ids_BT: Tensor, labels_BT: Tensor) -> float:
    """Mean cross-entropy in nats per token, without gradients."""
    return float(make_loss(model, None)(ids_BT, labels_BT))
