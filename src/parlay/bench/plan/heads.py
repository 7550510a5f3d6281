"""Models the cost of trained heads while they draft: describes each method's head by the sizes of a decoder.

Matrices that no decoder layer has are modelled as a wider MLP. Heads without layers are modelled as rows of an LM head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from parlay.cost.roofline import ModelShape
from parlay.drafters import options as methods

DRAFT_VOCAB = 4096
"""Number of tokens that a head can draft; the default of ``parlay train``."""
_MEDUSA_HEADS = 4
_FEW_HEADS = 3  # heads of blockwise decoding, and trained inputs of a group of probes
_LAYERS = 2  # layers of a head that drafts blocks, and of DynaMo's heads together
_EARLY = 2  # first layers of the target that Kangaroo runs to draft
_LATE = 1 / 3  # share of the target's layers that speculative streams run through


@dataclass(frozen=True, slots=True)
class HeadCost:
    """The cost of drafting with a head.

    A decoder of the sizes ``shape`` runs for each level of a draft or, with ``at_once``, once for all levels. None
    means that nothing runs besides the target. ``probes`` are extra rows in the verifying forward, which draft tokens.
    """

    shape: ModelShape | None
    at_once: bool = False
    probes: int = 0


def _layer(target: ModelShape, more: int, *, layers: int = 1) -> ModelShape:
    """Return a decoder of ``layers`` layers of the target's sizes, each with ``more`` further weights."""
    wider = _mlp_size(target) + round(more / (3 * target.hidden_size))
    return _headed(target, _draft_vocab(target), layers=layers, intermediate_size=wider)


def _headed(target: ModelShape, rows: int, *, layers: int = 0, intermediate_size: int = 0) -> ModelShape:
    """Return a decoder of the target's sizes with other layers and an LM head of ``rows`` rows.

    Its layers are alike, and all in memory: only the target's can be streamed, have experts or windows, or differ.
    """
    return replace(
        target,
        num_layers=layers,
        intermediate_size=intermediate_size,
        vocab_size=rows,
        tie_embeddings=True,
        stored_twice=False,
        recent_layers=0,
        recent_tokens=0,
        sums=None,
        split=None,
        mixed=None,
    )


def _mlp_size(target: ModelShape) -> int:
    """Return the inner size of the feed-forward that a row runs in one of the target's layers, experts included."""
    if target.mixed is None:
        return round(target.mlp_size)
    chosen = target.mixed.layers * target.mixed.chosen * target.mixed.weights / target.num_layers
    return round(target.mlp_size + chosen / (3 * target.hidden_size))


def _draft_vocab(target: ModelShape) -> int:
    return min(DRAFT_VOCAB, target.vocab_size)


def _eagle(target: ModelShape) -> HeadCost:
    """Return the cost of EAGLE: a product of a feature and an embedding, then a layer (Li et al. 2024)."""
    return HeadCost(_layer(target, 2 * target.hidden_size**2))


def _eagle3(target: ModelShape) -> HeadCost:
    """Return the cost of EAGLE-3: a product fuses the features of three layers, then a layer (Li et al. 2025).

    The layer's queries, keys and values read a feature and an embedding.
    """
    return HeadCost(_layer(target, _fused(target)))


def _fused(target: ModelShape) -> int:
    """Return the weights that EAGLE-3 has besides a layer like the target's.

    The fusing product reads three features. The projections read an embedding besides the feature.
    """
    return round(target.hidden_size * (target.qkv_size + 3 * target.hidden_size))


def _medusa(target: ModelShape) -> HeadCost:
    """Return the cost of Medusa: a square matrix and an LM head for each level (Cai et al. 2024)."""
    return HeadCost(_headed(target, _MEDUSA_HEADS * (target.hidden_size + _draft_vocab(target))), at_once=True)


def _steps(target: ModelShape) -> HeadCost:
    """Return the cost of recurrent heads: a small network that reads a state and an embedding, and an LM head."""
    return HeadCost(_headed(target, 2 * target.hidden_size + _draft_vocab(target)))


def _blockwise(target: ModelShape) -> HeadCost:
    """Return the cost of blockwise decoding: two matrices and an LM head for each token (Stern et al. 2018)."""
    return HeadCost(_headed(target, _FEW_HEADS * (2 * target.hidden_size + _draft_vocab(target))), at_once=True)


def _block(target: ModelShape) -> HeadCost:
    """Return the cost of a block drafter: layers like EAGLE-3's, which run once for all tokens of a block."""
    return HeadCost(_layer(target, _fused(target), layers=_LAYERS), at_once=True)


def _dynamo(target: ModelShape) -> HeadCost:
    """Return the cost of DynaMo: a layer and an LM head for each token."""
    shape = _headed(target, _LAYERS * _draft_vocab(target), layers=_LAYERS, intermediate_size=_mlp_size(target))
    return HeadCost(shape, at_once=True)


def _kangaroo(target: ModelShape) -> HeadCost:
    """Return the cost of Kangaroo: the target's first layers, then an attention and an LM head (Liu et al. 2024)."""
    shape = _headed(
        target, _draft_vocab(target) + 2 * target.hidden_size, layers=_EARLY, intermediate_size=_mlp_size(target)
    )
    return HeadCost(shape)


def _pass(target: ModelShape) -> HeadCost:
    """Return the cost of PaSS: a forward of the target itself."""
    return HeadCost(target, at_once=True)


def _probes(target: ModelShape) -> HeadCost:
    """Return the cost of parallel prompt decoding: only the rows of probes."""
    return HeadCost(None, probes=methods.PpdOptions().probes)


def _groups(target: ModelShape) -> HeadCost:
    """Return the cost of BiTA: rows for all trained inputs below each of some nodes."""
    return HeadCost(None, probes=_FEW_HEADS * methods.GroupOptions().groups)


def _streams(target: ModelShape) -> HeadCost:
    """Return the cost of speculative streaming: rows like BiTA's, which run only through the last layers."""
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
"""For each strategy, the function that returns its head's cost on a target of the given sizes."""
