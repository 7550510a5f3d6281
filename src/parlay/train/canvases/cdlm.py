"""CDLM (Kim et al. 2025, arXiv:2511.19269): a blockwise student is trained on a diffusion teacher's trajectories.

Shapes: B rows, T tokens of each, N blocks of a row, H hidden, M chosen places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.train.canvases import masks
from parlay.train.canvases.decoders import Decoder, canvas_config
from parlay.train.canvases.diffusion import LEAST_RATE, block_loss
from parlay.train.canvases.options import CdlmTrainOptions
from parlay.train.canvases.recipe import CanvasRecipe, Slow, Stepper, divergence
from parlay.train.canvases.rows import RowBatch

_AT_ONCE = 32
"""Number of rows that the teacher answers in one forward."""


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Texts that a teacher wrote, in ``batch``, and the order in which it decided their places.

    ``truth_BT`` are the tokens of the original data. ``rank_BT`` is a place's turn within its block, from 0; -1 in
    prompts. ``states_BTH`` are the teacher's hidden states before the LM head, at the moment it decided each place.
    """

    batch: RowBatch
    truth_BT: Tensor
    rank_BT: Tensor
    states_BTH: Tensor

    def of(self, rows_M: Tensor) -> Trajectories:
        """Return the trajectories of some rows."""
        batch = RowBatch(*(each[rows_M] for each in self.batch))
        return Trajectories(batch, self.truth_BT[rows_M], self.rank_BT[rows_M], self.states_BTH[rows_M])


@torch.no_grad()
def write(teacher: Decoder, asked: RowBatch, block: int) -> Trajectories:
    """Let the teacher write the answers block by block; each forward decides the one place it is surest of.

    Rows should be as long as those that the teacher was trained on, so they are not padded to whole blocks. A teacher
    infers from the number of open places how long the answer may be, and more places give worse answers.
    """
    parts = [
        _write(teacher, RowBatch(*(each[start : start + _AT_ONCE] for each in asked)), block)
        for start in range(0, len(asked.ids_BT), _AT_ONCE)
    ]
    written_BT, rank_BT, states_BTH = (torch.cat(each) for each in zip(*parts, strict=True))
    return Trajectories(asked._replace(ids_BT=written_BT), asked.ids_BT, rank_BT, states_BTH)


def _write(teacher: Decoder, asked: RowBatch, block: int) -> tuple[Tensor, Tensor, Tensor]:
    open_BT = asked.learned_BT.clone()
    rows_B, group_T = torch.arange(len(open_BT)), masks.groups_of(open_BT.shape[1], block)
    ids_BT = torch.where(open_BT, teacher.mask_id, asked.ids_BT)
    ranks_BT = torch.full_like(ids_BT, -1)
    states_BTH: Tensor | None = None
    while open_BT.any():
        hidden_BTH = teacher.hidden(ids_BT, masks.everybody(ids_BT.shape[1]))
        sure_BT, best_BT = teacher.head(hidden_BTH).softmax(-1).max(-1)
        first_B = torch.where(open_BT, group_T, len(group_T)).min(1).values
        may_BT = open_BT & (group_T[None] == first_B[:, None])
        place_B = torch.where(may_BT, sure_BT, -1.0).argmax(1)
        due_B = open_BT.any(1)
        rows, places = rows_B[due_B], place_B[due_B]
        ids_BT[rows, places] = best_BT[rows, places]
        in_block_B = (ranks_BT >= 0) & (group_T[None] == group_T[place_B][:, None])
        ranks_BT[rows, places] = in_block_B.sum(1)[due_B]
        states_BTH = torch.zeros_like(hidden_BTH) if states_BTH is None else states_BTH
        states_BTH[rows, places] = hidden_BTH[rows, places]
        open_BT[rows, places] = False
    assert states_BTH is not None, "answers have places"
    return ids_BT, ranks_BT, states_BTH


class Cdlm(CanvasRecipe):
    """CDLM's three losses, computed at a random state of each block on the teacher's trajectory.

    Distillation: at all places open in that state, the student is trained on the distribution by which the teacher
    later decided the place. So the student predicts at once what the teacher predicted one by one. Consistency: at
    places still open in a later state of the block, the student is trained on its own prediction in that later state,
    without gradient. Denoising: the student is trained on the original texts with random masks. The paper's summary
    does not say which places the consistency loss covers; here they lie in the same block, because a blockwise student
    does not see later blocks.
    """

    def __init__(self, options: CdlmTrainOptions, student: Decoder, teacher: Decoder, known: Trajectories) -> None:
        super().__init__(student, options.seed)
        self._options, self._teacher, self._known, self.multiple = options, teacher, known, options.block
        self._trajectories: dict[bytes, Trajectories] = {}

    def optimizer(self) -> Stepper:
        return Slow(self.decoder.inner, self._options.rate)

    def loss(self, batch: RowBatch) -> Tensor:
        """Return the loss on random trajectories, as many as the batch has rows."""
        rows = torch.randint(len(self._known.rank_BT), (len(batch.ids_BT),), generator=self.draw)
        return self.loss_of(self._known.of(rows))

    def measure(self, batches: Sequence[RowBatch]) -> dict[str, float]:
        """Return the mean loss on the teacher's answers to held-out prompts, each time at the same states."""
        self.draw.manual_seed(0)
        return {"loss": sum(float(self.loss_of(self._written(batch))) for batch in batches) / len(batches)}

    def _written(self, batch: RowBatch) -> Trajectories:
        """Return the teacher's answers to a batch. They are kept, because each takes as many forwards as it has
        places."""
        key = batch.ids_BT.numpy().tobytes()
        if key not in self._trajectories:
            asked = batch._replace(ids_BT=batch.ids_BT[:, : int(batch.length_B.max())])  # see `write`
            self._trajectories[key] = write(self._teacher, asked, self.multiple)
        return self._trajectories[key]

    def loss_of(self, known: Trajectories) -> Tensor:
        """Return the loss on these trajectories, at random states."""
        now_BT, later_BT = self._states(known.rank_BT)
        open_BT, still_BT = known.rank_BT >= now_BT, known.rank_BT >= later_BT
        hidden_BTH = self._hidden(known.batch, open_BT)
        with torch.no_grad():
            teacher_MV = self._teacher.head(known.states_BTH[open_BT])
            later_MV = self.decoder.head(self._hidden(known.batch, still_BT)[still_BT])
        distilled = divergence(teacher_MV, self.decoder.head(hidden_BTH[open_BT]))
        consistent = divergence(later_MV, self.decoder.head(hidden_BTH[still_BT]))
        total = self._options.distill * distilled + self._options.consistency * consistent
        if not self._options.denoise:
            return total
        rates = masks.spread_rates(len(open_BT) * self._blocks(open_BT), self.draw, LEAST_RATE)
        rate_BT = self._spread(rates.view(len(open_BT), -1), open_BT)
        return total + self._options.denoise * block_loss(self, known.batch._replace(ids_BT=known.truth_BT), rate_BT)

    def _states(self, rank_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Draw two states per block, the second later; return for each place how many places of its block each has
        decided."""
        size = self.multiple
        whole_BT = F.pad(rank_BT, (0, self._blocks(rank_BT) * size - rank_BT.shape[1]), value=-1)
        count_BN = (whole_BT >= 0).view(len(rank_BT), -1, size).sum(2)
        drawn = torch.rand(2, *count_BN.shape, generator=self.draw)
        now_BN = (drawn[0] * count_BN).long()
        later_BN = now_BN + 1 + (drawn[1] * (count_BN - now_BN)).long()
        return self._spread(now_BN, rank_BT), self._spread(later_BN, rank_BT)

    def _blocks(self, like_BT: Tensor) -> int:
        """Count the blocks in a row, N; the last block may be incomplete."""
        return -(-like_BT.shape[1] // self.multiple)

    def _spread(self, each_BN: Tensor, like_BT: Tensor) -> Tensor:
        """Give each position the value of its block."""
        return each_BN.repeat_interleave(self.multiple, 1)[:, : like_BT.shape[1]]

    def _hidden(self, batch: RowBatch, open_BT: Tensor) -> Tensor:
        """Return the states of rows whose open places are masked."""
        length = open_BT.shape[1]
        noisy_BT = torch.where(open_BT, self.decoder.mask_id, batch.ids_BT)
        seen = masks.two_streams(masks.groups_of(length, self.multiple))
        return self.decoder.streams(noisy_BT, batch.ids_BT, seen)[:, :length]

    def config(self) -> Mapping[str, Any]:
        return canvas_config(self.decoder.mask_id, self.multiple)
