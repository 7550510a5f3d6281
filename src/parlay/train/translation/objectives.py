"""Training losses of translators on batches of pairs: one kind writes token by token, the others fill canvases."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from parlay.sampling.answer_selectors import ways_on
from parlay.train.translation.losses import ctc_loss, dag_alignment, dag_loss
from parlay.train.translation.pairs import LENGTHS, Pair, Words
from parlay.train.translation.rows import IGNORED, Laid, Network, Rows, padded

_BEGINNINGS = 4
"""For how many beginnings of each answer a drafter is trained per batch; they share the rows of the answer."""
LENGTH_WEIGHT = 0.1
"""The weight of the length's cross-entropy; the tokens' weighs 1 (fairseq's value for these models)."""


class Batch(NamedTuple):
    """Pairs, laid out and packed into rows. ``share`` is the done part of the run; ``draw`` is the source of
    randomness."""

    pairs: Sequence[Pair]
    laid: Sequence[Laid]
    rows: Rows
    share: float
    draw: torch.Generator


class Objective(Protocol):
    """Lays out pairs, and returns the mean loss of a batch."""

    def fits(self, pair: Pair) -> bool:
        """Return whether the model can write this answer at all."""
        ...

    def lay(self, pair: Pair, draw: torch.Generator) -> Laid: ...

    def __call__(self, network: Network, batch: Batch) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class TokenByToken:
    """Next-token cross-entropy on the translation and its end token, after source and separator."""

    words: Words

    def fits(self, pair: Pair) -> bool:
        return True

    def lay(self, pair: Pair, draw: torch.Generator) -> Laid:
        text = (*pair.source, self.words.separator, *pair.target)
        return Laid(text, (), (*pair.target, self.words.end), len(pair.source) + 1)

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        return labelled_loss(network, network.hidden(batch.rows), batch)


@dataclass(frozen=True, slots=True)
class _Filling:
    """Base of objectives that fill canvases; it lays out the text before a canvas, and computes the loss of answers'
    lengths."""

    words: Words

    def fits(self, pair: Pair) -> bool:
        return len(pair.target) < LENGTHS

    def laid(self, pair: Pair, canvas: Sequence[int], labels: Sequence[int], begun: Sequence[int] = ()) -> Laid:
        """Lay out a canvas after the source, the separator and a beginning of the answer."""
        text = (*pair.source, self.words.separator, *begun)
        return Laid(text, canvas, labels, len(text))

    def length_loss(self, network: Network, hidden_MH: Tensor, batch: Batch) -> Tensor:
        """Return the cross-entropy of answers' lengths, predicted by the separator's row as tokens of numbers."""
        first, sources = self.words.first_length, torch.tensor([len(pair.source) for pair in batch.pairs])
        weight_JH = network.model.lm_head.weight[first : first + LENGTHS]
        logits_BJ = (hidden_MH[batch.rows.first_B + sources] @ weight_JH.T).float()
        return F.cross_entropy(logits_BJ, torch.tensor([len(pair.target) for pair in batch.pairs]))


def spread(source: Sequence[int], places: int) -> tuple[int, ...]:
    """Copy a source evenly to ``places`` places: place p gets token floor(p * S / places) of the source's S tokens."""
    return tuple([source[place * len(source) // places] for place in range(places)])


@dataclass(frozen=True, slots=True)
class MaskedTarget(_Filling):
    """CMLM (Ghazvininejad et al. 2019, arXiv:1904.09324): a random number of tokens is masked and predicted.

    For a share ``drafts`` of the pairs, the masks are ``block`` places after a beginning of the answer, which is part
    of the text. This trains the model to draft for a model that writes token by token (Xia et al. 2022,
    arXiv:2203.16487).
    """

    drafts: float
    block: int

    def lay(self, pair: Pair, draw: torch.Generator) -> Laid:
        size = len(pair.target)
        if float(torch.rand((), generator=draw)) < self.drafts:
            begun = int(torch.randint(0, size + 1, (), generator=draw))
            rest = (*pair.target[begun:], self.words.end)[: self.block]
            labels = (*rest, *[IGNORED] * (self.block - len(rest)))
            return self.laid(pair, (self.words.mask,) * self.block, labels, pair.target[:begun])
        count = int(torch.randint(1, size + 1, (), generator=draw))
        hidden = set(torch.randperm(size, generator=draw)[:count].tolist())
        canvas = [self.words.mask if at in hidden else token for at, token in enumerate(pair.target)]
        labels = tuple([token if at in hidden else IGNORED for at, token in enumerate(pair.target)])
        return self.laid(pair, canvas, labels)

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        hidden_MH = network.hidden(batch.rows)
        tokens = labelled_loss(network, hidden_MH, batch)
        return tokens + LENGTH_WEIGHT * self.length_loss(network, hidden_MH, batch)


@dataclass(frozen=True, slots=True)
class Ahead(_Filling):
    """Next-token cross-entropy on an answer, and on ``block`` masks after some of its beginnings.

    The masks of a beginning attend to each other. As in a causal model, the row before a place predicts it, so the last
    row of a beginning predicts the next token. The model still writes token by token, and also drafts for another model
    that does (Xia et al. 2022, arXiv:2203.16487).
    """

    block: int

    def lay(self, pair: Pair, draw: torch.Generator) -> Laid:
        begun = torch.randperm(len(pair.target), generator=draw)[:_BEGINNINGS].tolist()
        answer = (*pair.target, self.words.end, *[IGNORED] * self.block)
        ahead = [label for begin in begun for label in answer[begin + 1 : begin + 1 + self.block]]
        masks = (self.words.mask,) * len(ahead)
        found = self.laid(pair, masks, (*pair.target, self.words.end, *ahead), pair.target)
        return found._replace(begins=[len(pair.source) + 1 + begin for begin in begun])

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        return labelled_loss(network, network.hidden(batch.rows), batch)


@dataclass(frozen=True, slots=True)
class OnePass(_Filling):
    """All tokens in one pass, from the source copied evenly to the answer's places (Gu et al. 2018,
    arXiv:1711.02281)."""

    def lay(self, pair: Pair, draw: torch.Generator) -> Laid:
        return self.laid(pair, spread(pair.source, len(pair.target)), pair.target)

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        hidden_MH = network.hidden(batch.rows)
        tokens = labelled_loss(network, hidden_MH, batch)
        return tokens + LENGTH_WEIGHT * self.length_loss(network, hidden_MH, batch)


@dataclass(frozen=True, slots=True)
class Fertile(_Filling):
    """All tokens in one pass, from the source with each token repeated by its fertility (Gu et al. 2018,
    arXiv:1711.02281).

    A source token's fertility is the number of answer tokens aligned with it. The rows of another canvas, which reads
    the source, predict fertilities; in the paper the encoder does. In training they come from the pair's alignment.
    """

    def fits(self, pair: Pair) -> bool:
        return max(pair.fertilities) < LENGTHS

    def lay(self, pair: Pair, draw: torch.Generator) -> Laid:
        counted = zip(pair.source, pair.fertilities, strict=True)
        canvas = [token for token, count in counted for _ in range(count)]
        labels = [*(self.words.first_length + count for count in pair.fertilities), *pair.target]
        return self.laid(pair, canvas, labels)._replace(aside=pair.source)

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        return labelled_loss(network, network.hidden(batch.rows), batch)


@dataclass(frozen=True, slots=True)
class Glancing(_Filling):
    """GLAT (Qian et al. 2021, arXiv:2008.07905): shows the model some of the answer's tokens, and trains it on the
    others.

    A first pass predicts all tokens. The number of shown tokens is the number of its errors times a ratio, which falls
    from ``ratio`` to 0.1 over the run.
    """

    ratio: float

    def lay(self, pair: Pair, draw: torch.Generator) -> Laid:
        return self.laid(pair, (self.words.mask,) * len(pair.target), pair.target)

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        rows, labels_BC = batch.rows, padded([pair.target for pair in batch.pairs])
        canvas_BC = rows.canvas_BC
        with torch.no_grad():
            guess_M = network.logits(network.hidden(rows)[canvas_BC[rows.inside_BC]]).argmax(-1)
        wrong_BC = torch.zeros_like(rows.inside_BC)
        wrong_BC[rows.inside_BC] = guess_M != labels_BC[rows.inside_BC]
        shown_BC = glance(wrong_BC, rows.inside_BC, annealed(self.ratio, batch.share), batch.draw)
        hidden_MH = network.hidden(rows.filled(canvas_BC[shown_BC], labels_BC[shown_BC]))
        asked_BC = rows.inside_BC & ~shown_BC
        losses_M = F.cross_entropy(network.logits(hidden_MH[canvas_BC[asked_BC]]), labels_BC[asked_BC], reduction="sum")
        tokens = losses_M / asked_BC.sum().clamp(min=1)
        return tokens + LENGTH_WEIGHT * self.length_loss(network, hidden_MH, batch)


def annealed(ratio: float, share: float) -> float:
    """Return the glancing ratio at a share of the run: it falls linearly to 0.1, or stays if ``ratio`` is lower."""
    return ratio + (min(ratio, 0.1) - ratio) * min(1.0, share)


def glance(wrong_BC: Tensor, inside_BC: Tensor, ratio: float, draw: torch.Generator) -> Tensor:
    """Choose the tokens to show, bool ``[B, C]``: in each answer ``ratio`` times the number of wrong ones, at random
    places."""
    counts_B = ((wrong_BC & inside_BC).sum(1) * ratio).round()
    noise_BC = torch.rand(inside_BC.shape, generator=draw).masked_fill(~inside_BC, 2.0)
    return (noise_BC.argsort(1).argsort(1) < counts_B[:, None]) & inside_BC


@dataclass(frozen=True, slots=True)
class Frames(_Filling):
    """CTC (Libovicky & Helcl 2018, arXiv:1811.04719): a canvas has ``scale`` frames per source token, which read the
    source.

    An answer fits if frames are at least as many as its tokens plus its pairs of equal neighbours.
    """

    scale: int

    def fits(self, pair: Pair) -> bool:
        repeats = sum(one == other for one, other in itertools.pairwise(pair.target))
        return len(pair.target) + repeats <= self.scale * len(pair.source)

    def lay(self, pair: Pair, draw: torch.Generator) -> Laid:
        return self.laid(pair, spread(pair.source, self.scale * len(pair.source)), ())

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        rows, pairs = batch.rows, batch.pairs
        logits_BCV = network.logits(network.hidden(rows)[rows.canvas_BC])
        targets_BT = padded([pair.target for pair in pairs], 0)
        lengths_B = torch.tensor([len(pair.target) for pair in pairs])
        losses_B = ctc_loss(logits_BCV, rows.canvases_B, targets_BT, lengths_B, self.words.blank)
        return losses_B.sum() / lengths_B.sum()


@dataclass(frozen=True, slots=True)
class Graph(_Filling):
    """DA-Transformer (Huang et al. 2022, arXiv:2205.07459) with glancing: a canvas has ``scale`` vertices per source
    token.

    A vertex predicts a token, and the next vertex. The latter is read from the logits of number tokens: by attention
    with ``heads`` heads between vertices, or, with 0 heads, as distances. Answers end with the end token at the last
    vertex, so an answer needs fewer tokens than there are vertices.
    """

    scale: int
    ratio: float
    heads: int

    def fits(self, pair: Pair) -> bool:
        vertices = self.scale * len(pair.source)
        return len(pair.target) < vertices <= (LENGTHS - 1) * len(pair.target)

    def lay(self, pair: Pair, draw: torch.Generator) -> Laid:
        return self.laid(pair, (self.words.mask,) * self.scale * len(pair.source), ())

    def __call__(self, network: Network, batch: Batch) -> Tensor:
        rows, pairs = batch.rows, batch.pairs
        targets_BT = padded([(*pair.target, self.words.end) for pair in pairs], 0)
        lengths_B = torch.tensor([len(pair.target) + 1 for pair in pairs])
        with torch.no_grad():
            logits_BCV, emitted_BCT, going_BCC = self.graph(network, rows, targets_BT)
            aligned_BT = dag_alignment(emitted_BCT, going_BCC, rows.canvases_B, lengths_B)
        inside_BT, vertex_BT = aligned_BT >= 0, aligned_BT.clamp(min=0)
        wrong_BT = logits_BCV.argmax(-1).gather(1, vertex_BT) != targets_BT
        shown_BT = glance(wrong_BT, inside_BT, annealed(self.ratio, batch.share), batch.draw)
        flat_BT = (rows.first_B + rows.texts_B)[:, None] + vertex_BT
        shown = rows.filled(flat_BT[shown_BT], targets_BT[shown_BT])
        _, emitted_BCT, going_BCC = self.graph(network, shown, targets_BT)
        return dag_loss(emitted_BCT, going_BCC, rows.canvases_B, lengths_B).sum() / lengths_B.sum()

    def graph(self, network: Network, rows: Rows, targets_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the vertices' logits, log-probabilities of the answer's tokens ``[B, C, T]``, and of transitions ``[B,
        C, C]``."""
        logits_BCV = network.logits(network.hidden(rows)[rows.canvas_BC])
        first = self.words.first_length
        numbers_BCJ = logits_BCV[..., first : first + LENGTHS]
        tokens_BCV = torch.cat((logits_BCV[..., :first], logits_BCV[..., first + LENGTHS :]), -1)
        index_BCT = targets_BT[:, None].expand(-1, logits_BCV.shape[1], -1)
        emitted_BCT = logits_BCV.gather(2, index_BCT) - tokens_BCV.logsumexp(-1, keepdim=True)
        going_BCC = ways_on(numbers_BCJ, rows.canvases_B, self.heads)
        return tokens_BCV, emitted_BCT, going_BCC


def labelled_loss(network: Network, hidden_MH: Tensor, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the places that have a label; 0 if there are none."""
    numbers_L, labels_L = batch.rows.labels(batch.laid)
    logits_LV = network.logits(hidden_MH[numbers_L])
    return F.cross_entropy(logits_LV, labels_L, reduction="sum") / max(1, len(labels_L))
