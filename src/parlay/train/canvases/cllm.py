"""Consistency tuning (CLLM, Kou et al. 2024, arXiv:2403.00835): a causal model learns to jump to its fixed point.

Shapes: B rows, T tokens of each, K tokens of a block, S states of a trajectory, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parlay.train.canvases import masks
from parlay.train.canvases.decoders import Decoder
from parlay.train.canvases.options import CllmTrainOptions
from parlay.train.canvases.recipe import CanvasRecipe, Slow, Stepper, divergence, last_layers, next_token_loss
from parlay.train.canvases.rows import RowBatch
from parlay.train.data.user_texts import TrainingText
from parlay.types import ParlayError

_AT_ONCE = 32
"""Prompts that are gone on from in one forward."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A prefix, and the block after it as Jacobi iterations change it: the first state is a guess, the last stays."""

    prefix: tuple[int, ...]
    states: tuple[tuple[int, ...], ...]


@torch.no_grad()
def solve(decoder: Decoder, prefixes: Sequence[tuple[int, ...]], size: int, draw: torch.Generator) -> list[Trajectory]:
    """Iterate a block after each prefix until it stays, all at once. First guesses are drawn from the prefix."""
    block_BK = torch.tensor(
        [[prefix[int(at)] for at in torch.randint(len(prefix), (size,), generator=draw)] for prefix in prefixes]
    )
    starts_B = torch.tensor([len(prefix) for prefix in prefixes])
    states = [block_BK]
    for _ in range(size):
        new_BK = _logits(decoder, prefixes, states[-1], starts_B).argmax(-1)
        if torch.equal(new_BK, states[-1]):
            break
        states.append(new_BK)
    return [
        Trajectory(prefix, _until_stable([tuple(state[row].tolist()) for state in states]))
        for row, prefix in enumerate(prefixes)
    ]


def _until_stable(states: list[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    end = next(at for at, state in enumerate(states) if state == states[-1])
    return tuple(states[: end + 1])


def _logits(decoder: Decoder, prefixes: Sequence[tuple[int, ...]], block_BK: Tensor, starts_B: Tensor) -> Tensor:
    """``[B, K, V]``: what the model says of each place of the block, after the prefix and the block before it."""
    size = block_BK.shape[1]
    longest = int(starts_B.max()) + size
    ids_BT = torch.tensor(
        [
            [*prefix, *block, *[0] * (longest - len(prefix) - size)]
            for prefix, block in zip(prefixes, block_BK.tolist(), strict=True)
        ]
    )
    hidden_BTH = decoder.hidden(ids_BT, masks.causal(longest))
    places_BK = starts_B[:, None] - 1 + torch.arange(size)
    return decoder.head(hidden_BTH[torch.arange(len(ids_BT))[:, None], places_BK])


def write(decoder: Decoder, rows: Sequence[TrainingText], options: CllmTrainOptions, end: int) -> list[Trajectory]:
    """Trajectories of ``blocks`` blocks after each prompt, or after half of a document; a text that ended stays so.

    Raises ParlayError where no prompt leaves room.
    """
    draw = torch.Generator().manual_seed(options.seed)
    cut = [row.ids[: row.answer if row.answer > 1 else max(1, len(row.ids) // 2)] for row in rows[: options.prompts]]
    active = sorted([each[-options.length :] for each in cut], key=len)
    found: list[Trajectory] = []
    for _ in range(options.blocks):
        solved = [
            trajectory
            for start in range(0, len(active), _AT_ONCE)
            for trajectory in solve(decoder, active[start : start + _AT_ONCE], options.block, draw)
        ]
        found += solved
        active = [(*each.prefix, *each.states[-1]) for each in solved if end not in each.states[-1]]
    if not found:
        raise ParlayError("there are no prompts to go on from: give more texts")
    return found


class Cllm(CanvasRecipe):
    """Global consistency: after a drawn state of the block, the model says at each place what it says after the last.

    The distributions after the fixed point get no gradient. The fixed point itself is learned token by token, too,
    weighted by ``text_weight``, so that the model goes on writing as it did.
    """

    def __init__(self, options: CllmTrainOptions, decoder: Decoder, known: Sequence[Trajectory]) -> None:
        super().__init__(decoder, options.seed)
        self._options, self._known = options, [each for each in known if len(each.states) > 1]
        if not self._known:
            raise ParlayError("every block was right at its first guess: there is nothing to learn")

    def optimizer(self) -> Stepper:
        return Slow(last_layers(self.decoder, self._options.layers), self._options.rate)

    def loss(self, batch: RowBatch) -> Tensor:
        """The batch says how many trajectories; which ones are drawn."""
        chosen = torch.randint(len(self._known), (len(batch.ids_BT),), generator=self.draw).tolist()
        return self.loss_of([self._known[place] for place in chosen])

    def loss_of(self, known: Sequence[Trajectory]) -> Tensor:
        """The loss of these trajectories, at drawn states."""
        drawn = [int(torch.randint(len(each.states) - 1, (1,), generator=self.draw)) for each in known]
        states_BK = torch.tensor([each.states[at] for each, at in zip(known, drawn, strict=True)])
        last_BK = torch.tensor([each.states[-1] for each in known])
        prefixes, starts_B = [each.prefix for each in known], torch.tensor([len(each.prefix) for each in known])
        logits_BKV = _logits(self.decoder, prefixes * 2, torch.cat([states_BK, last_BK]), starts_B.repeat(2))
        early_BKV, fixed_BKV = logits_BKV.chunk(2)
        consistent = divergence(fixed_BKV.flatten(0, 1), early_BKV.flatten(0, 1))
        text = next_token_loss(fixed_BKV.flatten(0, 1), last_BK.flatten())
        return consistent + self._options.text_weight * text

    def config(self) -> Mapping[str, Any]:
        return {}

    def measure(self, batches: Sequence[RowBatch]) -> dict[str, float]:
        """Perplexity of the texts, and tokens that are right per Jacobi iteration after their prompts or halves."""
        nats = 0.0
        tokens = iterations = 0
        draw = torch.Generator().manual_seed(0)
        for batch in batches:
            hidden_BTH = self.decoder.hidden(batch.ids_BT, masks.causal(batch.ids_BT.shape[1]))
            nats += float(self.text_loss(hidden_BTH, batch)) / len(batches)
            halves = [
                tuple(ids[: answer if answer > 1 else max(1, length // 2)])
                for ids, answer, length in zip(*(each.tolist() for each in batch), strict=True)
            ]
            solved = solve(self.decoder, halves, self._options.block, draw)
            tokens += self._options.block * len(solved)
            iterations += sum(len(each.states) for each in solved)
        return {"perplexity": math.exp(nats), "tokens per iteration": tokens / iterations}
