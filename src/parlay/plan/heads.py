"""What trained heads cost while they draft: each method's head as the sizes of a decoder.

Matrices that no decoder layer has count as a wider MLP, and heads without layers as rows of an LM head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from parlay.cost.roofline import ModelShape
from parlay.drafters.heads.options import EAGLE, EAGLE2, EAGLE3, HYDRA, MEDUSA, MLP_SPECULATOR, MTP

DRAFT_VOCAB = 4096
"""Tokens that a head can draft, as ``parlay train`` makes it unless told otherwise."""
_MEDUSA_HEADS = 4


@dataclass(frozen=True, slots=True)
class HeadCost:
    """``shape`` runs for each level of a draft, or once for all levels if they are guessed ``at_once``."""

    shape: ModelShape
    at_once: bool = False


def _layer(target: ModelShape, more: int) -> HeadCost:
    """One layer of the target's sizes, with so many further weights."""
    wider = target.intermediate_size + round(more / (3 * target.hidden_size))
    return HeadCost(_headed(target, _draft_vocab(target), layers=1, intermediate_size=wider))


def _headed(target: ModelShape, rows: int, *, layers: int = 0, intermediate_size: int = 0) -> ModelShape:
    return replace(target, num_layers=layers, intermediate_size=intermediate_size, vocab_size=rows, tie_embeddings=True)


def _draft_vocab(target: ModelShape) -> int:
    return min(DRAFT_VOCAB, target.vocab_size)


def _eagle(target: ModelShape) -> HeadCost:
    """A layer behind a product that reads a feature and an embedding."""
    return _layer(target, 2 * target.hidden_size**2)


def _eagle3(target: ModelShape) -> HeadCost:
    """Queries, keys and values read a feature and an embedding; features of three layers are fused before."""
    return _layer(target, target.hidden_size * (target.qkv_size + 3 * target.hidden_size))


def _medusa(target: ModelShape) -> HeadCost:
    """A square matrix and an LM head for each level."""
    return HeadCost(_headed(target, _MEDUSA_HEADS * (target.hidden_size + _draft_vocab(target))), at_once=True)


def _steps(target: ModelShape) -> HeadCost:
    """A small network that reads a state and an embedding, and an LM head."""
    return HeadCost(_headed(target, 2 * target.hidden_size + _draft_vocab(target)))


HEADS: Mapping[str, Callable[[ModelShape], HeadCost]] = {
    EAGLE: _eagle,
    EAGLE2: _eagle,
    EAGLE3: _eagle3,
    MTP: _eagle,
    MEDUSA: _medusa,
    HYDRA: _steps,
    MLP_SPECULATOR: _steps,
}
"""By strategy: its head's cost on a target of these sizes."""
