"""EAGLE-3 (Li et al. 2025): training-time test over several steps, with the target's own distribution as labels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from parlay.heads.eagle3 import Eagle3Config, Eagle3Head
from parlay.heads.layer import Steps
from parlay.train.data.batches import TrainingBatch
from parlay.train.recipes.recipe import counted, soft_loss
from parlay.train.recipes.target import Target

DECAY = 0.8
"""What a step's loss counts for, relative to the step before."""


class Eagle3Recipe:
    """Loss: sum of 0.8^j times the cross-entropy of step j, over positions whose likeliest token can be proposed.

    ``embedding_VH`` is the target's, frozen. The head runs ``steps`` times, each time on its own outputs.
    """

    def __init__(self, head: Eagle3Head, embedding_VH: Tensor, steps: int) -> None:
        self._head, self._embedding_VH, self._steps = head, embedding_VH, steps
        ids_D = head.draft_ids
        self._draft_of_V = torch.full((head.config.layer.vocab_size,), -1)
        self._draft_of_V[ids_D] = torch.arange(len(ids_D))

    @property
    def module(self) -> nn.Module:
        return self._head

    @property
    def matrices(self) -> Sequence[nn.Parameter]:
        head = self._head
        return [weight for part in (head.fc, head.midlayer) for weight in part.parameters() if weight.ndim == 2]

    @property
    def slow(self) -> Sequence[nn.Parameter]:
        fast = {id(weight) for weight in self.matrices}
        return [weight for weight in self._head.parameters() if id(weight) not in fast]

    def loss(self, batch: TrainingBatch) -> Tensor:
        total = torch.zeros(())
        for step, hidden_BTH in enumerate(self._unrolled(batch)):
            ids_BTK, known_BT = self._labels(batch, step)
            rows_BT = known_BT & (ids_BTK[..., 0] >= 0)
            if rows_BT.any():
                probs_NK = _ahead(batch.best_probs_BTK, step + 1)[rows_BT]
                total = total + DECAY**step * soft_loss(
                    self._head.logits(hidden_BTH[rows_BT]), ids_BTK[rows_BT], probs_NK
                )
        return total

    def right(self, batch: TrainingBatch) -> Tensor:
        found = []
        for step, hidden_BTH in enumerate(self._unrolled(batch)):
            ids_BTK, known_BT = self._labels(batch, step)
            right_BT = torch.full(known_BT.shape, -1)
            right_BT[known_BT] = (self._head.logits(hidden_BTH[known_BT]).argmax(-1) == ids_BTK[known_BT][:, 0]).long()
            found.append(right_BT)
        return counted(found)

    def _unrolled(self, batch: TrainingBatch) -> list[Tensor]:
        """Hidden states ``[B, T, H]`` after each step; row i of step j belongs to token i + 1 + j."""
        embedded_BTH = torch.nn.functional.embedding(batch.ids_BT, self._embedding_VH)
        hidden_BTH, steps, found = self._head.fuse(batch.taps_BTF), Steps(), []
        for step in range(self._steps):
            hidden_BTH = self._head.step(hidden_BTH, _ahead(embedded_BTH, step + 1), steps)
            found.append(hidden_BTH)
        return found

    def _labels(self, batch: TrainingBatch, step: int) -> tuple[Tensor, Tensor]:
        """Draft ids ``[B, T, K]`` of the likeliest tokens after token i + 1 + step, and where they are known."""
        return self._draft_of_V[_ahead(batch.best_ids_BTK, step + 1)], _ahead(batch.known_BT, step + 1)


def fresh_head(target: Target, draft_ids_D: Tensor, taps: tuple[int, ...]) -> Eagle3Head:
    """A head to start from: norms, LM head and layer are the target's last ones, and features pass by as they are.

    What attention reads of the embedding is new: small random numbers.
    """
    config, own = target.config, target.last_layer()
    head = Eagle3Head(Eagle3Config(config, len(draft_ids_D), taps))
    head.set_draft_vocab(draft_ids_D)
    size, layer = config.hidden_size, head.midlayer
    copied = {
        layer.hidden_norm.weight: own["input_layernorm.weight"],
        layer.post_attention_layernorm.weight: own["post_attention_layernorm.weight"],
        layer.self_attn.o_proj.weight: own["self_attn.o_proj.weight"],
        layer.mlp.gate_proj.weight: own["mlp.gate_proj.weight"],
        layer.mlp.up_proj.weight: own["mlp.up_proj.weight"],
        layer.mlp.down_proj.weight: own["mlp.down_proj.weight"],
        head.norm.weight: target.tensor("model.norm.weight"),
        head.lm_head.weight: target.head_VH[draft_ids_D].float(),
    }
    with torch.no_grad():
        for weight, of in copied.items():
            weight.copy_(of)
        for part in ("q", "k", "v"):
            weight = layer.self_attn.get_parameter(f"{part}_proj.weight")
            weight.normal_(0, 0.02)
            weight[:, size:] = own[f"self_attn.{part}_proj.weight"]
        head.fc.weight.normal_(0, 0.002)
        head.fc.weight[:, -size:] += torch.eye(size)
    return head


def _ahead(x: Tensor, count: int) -> Tensor:
    """``x`` ``[B, T, ...]`` moved: row i of each text is its row i + ``count``. Zeros come in at the end."""
    return torch.cat((x[:, count:], torch.zeros_like(x[:, :count])), 1)
