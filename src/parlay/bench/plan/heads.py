"""The cost of trained heads while they draft: each method's head as the sizes of a decoder.

Matrices that no decoder layer has count as a wider MLP, and heads without layers as rows of an LM head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from parlay.cost.roofline import ModelShape
from parlay.drafters import options as methods

DRAFT_VOCAB = 4096
"""Tokens that a head can draft, as ``parlay train`` makes it unless told otherwise."""
_MEDUSA_HEADS = 4
_FEW_HEADS = 3  # of blockwise decoding, and trained inputs of probes
_LAYERS = 2  # of a head that guesses blocks, and of DynaMo's heads together
_EARLY = 2  # of the target's layers, which Kangaroo runs
_LATE = 1 / 3  # of the target's layers, through which streams run


@dataclass(frozen=True, slots=True)
class HeadCost:
    """``shape`` runs for each level of a draft, or once for all levels if they are drafted ``at_once``; None: no head.

    ``probes`` are extra rows in the verifying forward that draft tokens.
    """

    shape: ModelShape | None
    at_once: bool = False
    probes: int = 0


def _layer(target: ModelShape, more: int, *, layers: int = 1) -> ModelShape:
    """Layers of the target's sizes, each with so many further weights."""
    wider = target.intermediate_size + round(more / (3 * target.hidden_size))
    return _headed(target, _draft_vocab(target), layers=layers, intermediate_size=wider)


def _headed(target: ModelShape, rows: int, *, layers: int = 0, intermediate_size: int = 0) -> ModelShape:
    return replace(target, num_layers=layers, intermediate_size=intermediate_size, vocab_size=rows, tie_embeddings=True)


def _draft_vocab(target: ModelShape) -> int:
    return min(DRAFT_VOCAB, target.vocab_size)


def _eagle(target: ModelShape) -> HeadCost:
    """A layer behind a product that reads a feature and an embedding."""
    return HeadCost(_layer(target, 2 * target.hidden_size**2))


def _eagle3(target: ModelShape) -> HeadCost:
    """Queries, keys and values read a feature and an embedding; features of three layers are fused before."""
    return HeadCost(_layer(target, _fused(target)))


def _fused(target: ModelShape) -> int:
    """Weights that EAGLE-3's layer has more than one of the target's."""
    return round(target.hidden_size * (target.qkv_size + 3 * target.hidden_size))


def _medusa(target: ModelShape) -> HeadCost:
    """A square matrix and an LM head for each level."""
    return HeadCost(_headed(target, _MEDUSA_HEADS * (target.hidden_size + _draft_vocab(target))), at_once=True)


def _steps(target: ModelShape) -> HeadCost:
    """A small network that reads a state and an embedding, and an LM head."""
    return HeadCost(_headed(target, 2 * target.hidden_size + _draft_vocab(target)))


def _blockwise(target: ModelShape) -> HeadCost:
    """Two matrices and the LM head's rows for each token."""
    return HeadCost(_headed(target, _FEW_HEADS * (2 * target.hidden_size + _draft_vocab(target))), at_once=True)


def _block(target: ModelShape) -> HeadCost:
    """Layers like EAGLE-3's, once for all tokens of a block."""
    return HeadCost(_layer(target, _fused(target), layers=_LAYERS), at_once=True)


def _dynamo(target: ModelShape) -> HeadCost:
    """A layer and the LM head's rows for each token."""
    shape = _headed(target, _LAYERS * _draft_vocab(target), layers=_LAYERS, intermediate_size=target.intermediate_size)
    return HeadCost(shape, at_once=True)


def _kangaroo(target: ModelShape) -> HeadCost:
    """The target's first layers, an attention behind them, and the LM head's rows."""
    shape = _headed(
        target, _draft_vocab(target) + 2 * target.hidden_size, layers=_EARLY, intermediate_size=target.intermediate_size
    )
    return HeadCost(shape)


def _pass(target: ModelShape) -> HeadCost:
    """A forward of the target itself."""
    return HeadCost(target, at_once=True)


def _probes(target: ModelShape) -> HeadCost:
    """Rows alone."""
    return HeadCost(None, probes=methods.PpdOptions().probes)


def _groups(target: ModelShape) -> HeadCost:
    """All trained inputs below each of some nodes."""
    return HeadCost(None, probes=_FEW_HEADS * methods.GroupOptions().groups)


def _streams(target: ModelShape) -> HeadCost:
    """The same, through the last layers alone."""
    return HeadCost(None, probes=round(_LATE * _FEW_HEADS * methods.GroupOptions().groups))


HEADS: Mapping[str, Callable[[ModelShape], HeadCost]] = {
    methods.EAGLE: _eagle,
    methods.EAGLE2: _eagle,
    methods.EAGLE3: _eagle3,
    methods.MTP: _eagle,
    methods.MEDUSA: _medusa,
    methods.HYDRA: _steps,
    methods.MLP_SPECULATOR: _steps,
    methods.REDRAFTER: _steps,
    methods.BLOCKWISE: _blockwise,
    methods.BLOCK_DRAFTER: _block,
    methods.DYNAMO: _dynamo,
    methods.KANGAROO: _kangaroo,
    methods.PASS: _pass,
    methods.PPD: _probes,
    methods.BITA: _groups,
    methods.STREAMING: _streams,
}
"""By strategy: its head's cost on a target of these sizes."""
