"""Losses of each kind of translator on a batch of pairs: one writes token by token, the others fill canvases."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3ForCausalLM

from parlay.sampling.answer_selectors import jumps
from parlay.train.translation.losses import ctc_loss, dag_alignment, dag_loss
from parlay.train.translation.pairs import LENGTHS, Pair, Words
from parlay.train.translation.rows import IGNORED, Rows, hidden_of, padded, taken

LENGTH_WEIGHT = 0.1
"""Of the length's cross-entropy beside that of the tokens (fairseq's value for these models)."""


class Objective(Protocol):
    """The mean loss of a batch. ``share`` of the run is over; ``draw`` gives the noise."""

    def fits(self, pair: Pair) -> bool:
        """Whether the model can write this answer at all."""
        ...

    def __call__(
        self, model: Qwen3ForCausalLM, pairs: Sequence[Pair], share: float, draw: torch.Generator
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class TokenByToken:
    """Next-token cross-entropy on the translation and its end, after source and separator."""

    words: Words

    def fits(self, pair: Pair) -> bool:
        return True

    def __call__(self, model: Qwen3ForCausalLM, pairs: Sequence[Pair], share: float, draw: torch.Generator) -> Tensor:
        texts = [(*pair.source, self.words.separator, *pair.target) for pair in pairs]
        labels = [(*[IGNORED] * len(pair.source), *pair.target, self.words.end) for pair in pairs]
        hidden_BNH = model.model(input_ids=padded(texts, 0), use_cache=False).last_hidden_state
        labels_BN = padded(labels)
        wanted_BN = labels_BN != IGNORED
        logits_MV = model.lm_head(hidden_BNH[wanted_BN]).float()
        return F.cross_entropy(logits_MV, labels_BN[wanted_BN])


@dataclass(frozen=True, slots=True)
class _Filling:
    """Share texts of source and separator, and the loss of lengths, among objectives that fill canvases."""

    words: Words

    def fits(self, pair: Pair) -> bool:
        return len(pair.target) < LENGTHS

    def texts(self, pairs: Sequence[Pair]) -> list[tuple[int, ...]]:
        return [(*pair.source, self.words.separator) for pair in pairs]

    def length_loss(self, model: Qwen3ForCausalLM, hidden_BNH: Tensor, rows: Rows, pairs: Sequence[Pair]) -> Tensor:
        """Cross-entropy of the answer's length, which the separator's row tells by the tokens of numbers."""
        last_BH = taken(hidden_BNH, rows.texts_B[:, None] - 1)[:, 0]
        first = self.words.first_length
        logits_BJ = (last_BH @ model.lm_head.weight[first : first + LENGTHS].T).float()
        lengths = torch.tensor([len(pair.target) for pair in pairs])
        return F.cross_entropy(logits_BJ, lengths)


def spread(source: Sequence[int], places: int) -> tuple[int, ...]:
    """A source copied evenly to so many places: place p reads token floor(p * S / places)."""
    return tuple([source[place * len(source) // places] for place in range(places)])


@dataclass(frozen=True, slots=True)
class MaskedTarget(_Filling):
    """CMLM (Ghazvininejad et al. 2019, arXiv:1904.09324): some tokens are masked, as many as chance says, and guessed.

    Of ``drafts`` of the batches the masks are the next ``block`` places after the beginning of an answer, which is
    text. So the model drafts for one that writes token by token (Xia et al. 2022, arXiv:2203.16487).
    """

    drafts: float
    block: int

    def __call__(self, model: Qwen3ForCausalLM, pairs: Sequence[Pair], share: float, draw: torch.Generator) -> Tensor:
        if float(torch.rand((), generator=draw)) < self.drafts:
            return self.draft_loss(model, pairs, draw)
        canvases, labels = [], []
        for pair in pairs:
            size = len(pair.target)
            count = int(torch.randint(1, size + 1, (), generator=draw))
            hidden = set(torch.randperm(size, generator=draw)[:count].tolist())
            canvases.append([self.words.mask if at in hidden else token for at, token in enumerate(pair.target)])
            labels.append([token if at in hidden else IGNORED for at, token in enumerate(pair.target)])
        rows = Rows.of(self.texts(pairs), canvases)
        hidden_BNH = hidden_of(model, rows)
        tokens = labelled_loss(model, taken(hidden_BNH, rows.canvas_BC), padded(labels))
        return tokens + LENGTH_WEIGHT * self.length_loss(model, hidden_BNH, rows, pairs)

    def draft_loss(self, model: Qwen3ForCausalLM, pairs: Sequence[Pair], draw: torch.Generator) -> Tensor:
        texts, labels = [], []
        for pair, text in zip(pairs, self.texts(pairs), strict=True):
            begun = int(torch.randint(0, len(pair.target) + 1, (), generator=draw))
            rest = (*pair.target[begun:], self.words.end)[: self.block]
            texts.append((*text, *pair.target[:begun]))
            labels.append([*rest, *[IGNORED] * (self.block - len(rest))])
        rows = Rows.of(texts, [[self.words.mask] * self.block] * len(pairs))
        return labelled_loss(model, taken(hidden_of(model, rows), rows.canvas_BC), padded(labels))


@dataclass(frozen=True, slots=True)
class OnePass(_Filling):
    """All tokens at once, from the source spread over the answer's places (Gu et al. 2018, arXiv:1711.02281)."""

    def __call__(self, model: Qwen3ForCausalLM, pairs: Sequence[Pair], share: float, draw: torch.Generator) -> Tensor:
        rows = Rows.of(self.texts(pairs), [spread(pair.source, len(pair.target)) for pair in pairs])
        hidden_BNH = hidden_of(model, rows)
        tokens = labelled_loss(model, taken(hidden_BNH, rows.canvas_BC), padded([pair.target for pair in pairs]))
        return tokens + LENGTH_WEIGHT * self.length_loss(model, hidden_BNH, rows, pairs)


@dataclass(frozen=True, slots=True)
class Glancing(_Filling):
    """GLAT (Qian et al. 2021, arXiv:2008.07905): tokens are shown, the more the worse a first pass guesses; then the
    others are guessed.

    So many tokens are shown: wrong ones of the first pass times a ratio, from ``ratio`` down to 0.1 over the run.
    """

    ratio: float

    def __call__(self, model: Qwen3ForCausalLM, pairs: Sequence[Pair], share: float, draw: torch.Generator) -> Tensor:
        rows = Rows.of(self.texts(pairs), [[self.words.mask] * len(pair.target) for pair in pairs])
        labels_BC = padded([pair.target for pair in pairs])
        with torch.no_grad():
            guess_BC = model.lm_head(taken(hidden_of(model, rows), rows.canvas_BC)).argmax(-1)
        shown_BC = glance(guess_BC != labels_BC, rows.inside_BC, annealed(self.ratio, share), draw)
        rows.ids_BN.scatter_(1, rows.canvas_BC, torch.where(shown_BC, labels_BC, rows.ids_BN.gather(1, rows.canvas_BC)))
        hidden_BNH = hidden_of(model, rows)
        asked_BC = labels_BC.masked_fill(shown_BC, IGNORED)
        tokens = labelled_loss(model, taken(hidden_BNH, rows.canvas_BC), asked_BC)
        return tokens + LENGTH_WEIGHT * self.length_loss(model, hidden_BNH, rows, pairs)


def annealed(ratio: float, share: float) -> float:
    """The glancing ratio after this share of a run: it falls evenly to 0.1, or stays where it begins lower."""
    return ratio + (min(ratio, 0.1) - ratio) * min(1.0, share)


def glance(wrong_BC: Tensor, inside_BC: Tensor, ratio: float, draw: torch.Generator) -> Tensor:
    """Choose which tokens ``[B, C]`` are shown: ``ratio`` times the wrong ones of each answer, at random places."""
    counts_B = ((wrong_BC & inside_BC).sum(1) * ratio).round()
    noise_BC = torch.rand(inside_BC.shape, generator=draw).masked_fill(~inside_BC, 2.0)
    return (noise_BC.argsort(1).argsort(1) < counts_B[:, None]) & inside_BC


@dataclass(frozen=True, slots=True)
class Frames(_Filling):
    """CTC (Libovicky & Helcl 2018, arXiv:1811.04719): ``scale`` frames for each token of the source, which they read.

    An answer fits that has no more tokens than frames, with a frame more between equal neighbours.
    """

    scale: int

    def fits(self, pair: Pair) -> bool:
        repeats = sum(one == other for one, other in itertools.pairwise(pair.target))
        return len(pair.target) + repeats <= self.scale * len(pair.source)

    def __call__(self, model: Qwen3ForCausalLM, pairs: Sequence[Pair], share: float, draw: torch.Generator) -> Tensor:
        canvases = [spread(pair.source, self.scale * len(pair.source)) for pair in pairs]
        rows = Rows.of(self.texts(pairs), canvases)
        logits_BCV = model.lm_head(taken(hidden_of(model, rows), rows.canvas_BC)).float()
        targets_BT = padded([pair.target for pair in pairs], 0)
        lengths_B = torch.tensor([len(pair.target) for pair in pairs])
        losses_B = ctc_loss(logits_BCV, rows.canvases_B, targets_BT, lengths_B, self.words.blank)
        return losses_B.sum() / lengths_B.sum()


@dataclass(frozen=True, slots=True)
class Graph(_Filling):
    """DA-Transformer (Huang et al. 2022, arXiv:2205.07459) with glancing: ``scale`` vertices for each source token.

    A vertex has a distribution of tokens, and one of distances to the next vertex, read off the tokens of numbers. Its
    paper has distances from attention between vertices. Answers end with the end token at the last vertex, so one fits
    that has fewer tokens than there are vertices.
    """

    scale: int
    ratio: float

    def fits(self, pair: Pair) -> bool:
        vertices = self.scale * len(pair.source)
        return len(pair.target) < vertices <= (LENGTHS - 1) * len(pair.target)

    def __call__(self, model: Qwen3ForCausalLM, pairs: Sequence[Pair], share: float, draw: torch.Generator) -> Tensor:
        rows = Rows.of(self.texts(pairs), [[self.words.mask] * self.scale * len(pair.source) for pair in pairs])
        targets_BT = padded([(*pair.target, self.words.end) for pair in pairs], 0)
        lengths_B = torch.tensor([len(pair.target) + 1 for pair in pairs])
        with torch.no_grad():
            logits_BCV, emitted_BCT, going_BCC = self.graph(model, rows, targets_BT)
            aligned_BT = dag_alignment(emitted_BCT, going_BCC, rows.canvases_B, lengths_B)
        vertex_BT = aligned_BT.clamp(min=0)
        wrong_BT = logits_BCV.argmax(-1).gather(1, vertex_BT) != targets_BT
        shown_BT = glance(wrong_BT, aligned_BT >= 0, annealed(self.ratio, share), draw)
        for at in range(shown_BT.shape[1]):  # vertices of a path differ, so no place is written twice
            place_B1 = (rows.texts_B + vertex_BT[:, at])[:, None]
            token_B1 = torch.where(
                shown_BT[:, at : at + 1], targets_BT[:, at : at + 1], rows.ids_BN.gather(1, place_B1)
            )
            rows.ids_BN.scatter_(1, place_B1, token_B1)
        _, emitted_BCT, going_BCC = self.graph(model, rows, targets_BT)
        return dag_loss(emitted_BCT, going_BCC, rows.canvases_B, lengths_B).sum() / lengths_B.sum()

    def graph(self, model: Qwen3ForCausalLM, rows: Rows, targets_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the vertices, log-probabilities of the answer's tokens ``[B, C, T]``, and of ways on."""
        logits_BCV = model.lm_head(taken(hidden_of(model, rows), rows.canvas_BC)).float()
        first = self.words.first_length
        numbers_BCJ = logits_BCV[..., first : first + LENGTHS]
        tokens_BCV = torch.cat((logits_BCV[..., :first], logits_BCV[..., first + LENGTHS :]), -1)
        index_BCT = targets_BT[:, None].expand(-1, logits_BCV.shape[1], -1)
        emitted_BCT = logits_BCV.gather(2, index_BCT) - tokens_BCV.logsumexp(-1, keepdim=True)
        return tokens_BCV, emitted_BCT, jumps(numbers_BCJ, rows.canvases_B)


def labelled_loss(model: Qwen3ForCausalLM, states_BCH: Tensor, labels_BC: Tensor) -> Tensor:
    """Mean cross-entropy of the places that have a label; 0 where none has."""
    wanted_BC = labels_BC != IGNORED
    logits_MV = model.lm_head(states_BCH[wanted_BC]).float()
    return F.cross_entropy(logits_MV, labels_BC[wanted_BC], reduction="sum") / wanted_BC.sum().clamp(min=1)
