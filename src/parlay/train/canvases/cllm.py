"""Consistency tuning (CLLM, Kou et al. 2024, arXiv:2403.00835): Jacobi iterations then converge in fewer forwards.

Jacobi decoding starts from a guessed block of tokens and repeatedly predicts all of them at once, until nothing
changes: the fixed point is the greedy text.

Shapes: B rows, T tokens of each, K tokens of a block, G blocks of a row and their M = G K rows, S = T + M; V tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parlay.llm.llm import LLM
from parlay.text.prompts import TokensPrompt
from parlay.train.canvases import masks
from parlay.train.canvases.decoders import Decoder
from parlay.train.canvases.options import CllmTrainOptions
from parlay.train.canvases.recipe import CanvasRecipe, Slow, Stepper, divergence, last_layers
from parlay.train.canvases.rows import RowBatch, anchors, batch_of
from parlay.train.data.user_texts import TrainingText
from parlay.types import ParlayError, SamplingParams

_MOST_ITERATIONS = 4
"""Most Jacobi iterations before a state is trained on: later states are hardly ever wrong."""
_DECAY = 0.8
"""After the first wrong token of a state, each place weighs this much of the place before it."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A prefix, and the states of the block after it under Jacobi iteration: first a guess, last the fixed point."""

    prefix: tuple[int, ...]
    states: tuple[tuple[int, ...], ...]


@torch.no_grad()
def solve(decoder: Decoder, prefixes: Sequence[tuple[int, ...]], size: int, draw: torch.Generator) -> list[Trajectory]:
    """Iterate the block of ``size`` tokens after each prefix to its fixed point, all blocks at once.

    Initial guesses are drawn from the prefix's tokens.
    """
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
    """Return the model's logits ``[B, K, V]`` for each place of the block, given the prefix and the block before the
    place."""
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


def write(model: str, rows: Sequence[TrainingText], options: CllmTrainOptions) -> list[TrainingText]:
    """Let the model answer each prompt, or continue the first half of each document, greedily.

    Every block of such a text is a fixed point. Raises ParlayError if no answer has two tokens.
    """
    prompts = [
        row.ids[: row.answer if row.answer > 1 else max(1, len(row.ids) // 2)] for row in rows[: options.prompts]
    ]
    params = SamplingParams(temperature=0, max_tokens=options.blocks * options.block)
    with LLM(model) as llm:
        answers = llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params, strategy="none")
    texts = [
        TrainingText((*prompt, *answer.outputs[0].token_ids), len(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    long = [text for text in texts if len(text.ids) > text.answer + 1]
    if not long:
        raise ParlayError("the model ends all its answers at once, so there is nothing to go on from: give other texts")
    return long


class Cllm(CanvasRecipe):
    """Global consistency loss: from a wrong state of a block, the model learns to predict the fixed point at each
    place.

    Every block of a text that the model wrote greedily is a fixed point. Blocks begin at random places. Their states
    are guesses from the prompt after 0 to 4 iterations of the current model, so the model is trained on states that it
    will meet. The labels are the distributions of the model before training (``original``); they are also the labels at
    the clean text, which preserves how the model writes. In the paper, the labels are the current model's own, so it
    may drift.
    """

    def __init__(
        self, options: CllmTrainOptions, decoder: Decoder, original: Decoder, known: Sequence[TrainingText], end: int
    ) -> None:
        """``known``: the model's own texts, written by `write`."""
        super().__init__(decoder, options.seed)
        self._options, self._original, self._known, self._end = options, original, known, end

    def optimizer(self) -> Stepper:
        return Slow(last_layers(self.decoder, self._options.layers), self._options.rate)

    def loss(self, batch: RowBatch) -> Tensor:
        """Return the loss of preserving the model on the batch, plus `loss_of` on as many of its own texts."""
        chosen = torch.randint(len(self._known), (len(batch.ids_BT),), generator=self.draw).tolist()
        own = batch_of([self._known[place] for place in chosen], self._end, 1)
        hidden_BTH, _ = self.decoder.read(batch.ids_BT)
        return self._options.keep * self._kept(hidden_BTH, self._original_hidden(batch), batch) + self.loss_of(own)

    def loss_of(self, own: RowBatch) -> Tensor:
        """Return the loss on the model's own texts: predicting them from wrong states, and preserving the model on
        them."""
        original_BTH = self._original_hidden(own)
        place_BM = (
            anchors(own, self._options.groups, self.draw)[:, :, None] + torch.arange(self._options.block)
        ).flatten(1)
        state_BM = self._states(own, place_BM)
        hidden_BTH, cache = self.decoder.read(own.ids_BT)
        early_BMH = self.decoder.further(state_BM, place_BM, self._attention_mask(own, place_BM), cache)
        weight_BM = self._weights(own, place_BM, state_BM)
        rows_P, at_P = weight_BM.nonzero(as_tuple=True)
        right_PV = self._original.head(original_BTH[rows_P, place_BM[rows_P, at_P]]).log_softmax(-1)
        early_PV = self.decoder.head(early_BMH[rows_P, at_P]).log_softmax(-1)
        each_P = (right_PV.exp() * (right_PV - early_PV)).sum(-1) * weight_BM[rows_P, at_P]
        jumped = each_P.sum() / weight_BM.sum().clamp(min=1)
        return jumped + self._options.keep * self._kept(hidden_BTH, original_BTH, own)

    def _original_hidden(self, batch: RowBatch) -> Tensor:
        with torch.no_grad():
            return self._original.hidden(batch.ids_BT, masks.causal(batch.ids_BT.shape[1]))

    def _kept(self, hidden_BTH: Tensor, original_BTH: Tensor, batch: RowBatch) -> Tensor:
        """Return the divergence of the model's predictions on a text from the original model's."""
        wanted_BT = batch.text_BT[:, 1:]
        original_PV = self._original.head(original_BTH[:, :-1][wanted_BT])
        return divergence(original_PV, self.decoder.head(hidden_BTH[:, :-1][wanted_BT]))

    @torch.no_grad()
    def _states(self, own: RowBatch, place_BM: Tensor) -> Tensor:
        """Fill the blocks with tokens of the prompt, and iterate them a random number of times."""
        drawn_BM = (torch.rand(place_BM.shape, generator=self.draw) * own.answer_B[:, None]).long()
        state_BM, length = own.ids_BT.gather(1, drawn_BM), own.ids_BT.shape[1]
        count = int(torch.randint(_MOST_ITERATIONS + 1, (1,), generator=self.draw))
        if not count:
            return state_BM
        _, cache = self.decoder.read(own.ids_BT)
        mask_BMS, size = self._attention_mask(own, place_BM), self._options.block
        first_BG = own.ids_BT.gather(1, place_BM[:, ::size].clamp(max=length - 1))
        for _ in range(count):
            hidden_BMH = self.decoder.further(state_BM, place_BM, mask_BMS, cache)
            cache.crop(-state_BM.shape[1])
            next_BGK = self.decoder.head(hidden_BMH).argmax(-1).view(len(state_BM), -1, size)
            state_BM = torch.cat([first_BG[:, :, None], next_BGK[:, :, :-1]], 2).flatten(1)
        return state_BM

    def _attention_mask(self, own: RowBatch, place_BM: Tensor) -> Tensor:
        """Return the mask by which a block's row attends to the text before the block, and to the block up to
        itself."""
        size, length = self._options.block, own.ids_BT.shape[1]
        begin_BM, number_M = place_BM[:, ::size].repeat_interleave(size, 1), torch.arange(place_BM.shape[1])
        same_MM = (number_M[:, None] // size == number_M // size) & (number_M <= number_M[:, None])
        text_BMT = torch.arange(length) < begin_BM[:, :, None]
        return torch.cat([text_BMT, same_MM.expand(len(place_BM), -1, -1)], 2)

    def _weights(self, own: RowBatch, place_BM: Tensor, state_BM: Tensor) -> Tensor:
        """Return the weight of each row of a block: 0 before the first wrong token, and falling after it; see
        `_DECAY`."""
        length = own.ids_BT.shape[1]
        wrong_BM = state_BM != own.ids_BT.gather(1, place_BM.clamp(max=length - 1))
        past_BM = wrong_BM.view(len(wrong_BM), -1, self._options.block).long().cummax(2).values.cumsum(2).flatten(1)
        return torch.where((past_BM > 0) & (place_BM + 1 < own.length_B[:, None]), _DECAY ** (past_BM - 1), 0.0)

    def config(self) -> Mapping[str, Any]:
        return {}

    def measure(self, batches: Sequence[RowBatch]) -> dict[str, float]:
        """Measure perplexity on texts, and how Jacobi iteration solves blocks after prompts or half documents.

        Tokens per iteration tell how fast blocks are solved. The share of distinct tokens in a solved block tells
        whether it is still text: a model that repeats one token solves each block at once, and its perplexity may
        hardly rise.
        """
        nats = distinct = 0.0
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
            distinct += sum(len(set(each.states[-1])) for each in solved)
        return {
            "perplexity": math.exp(nats),
            "tokens per iteration": tokens / iterations,
            "distinct tokens": distinct / tokens,
        }
