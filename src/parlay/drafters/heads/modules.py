"""Which tensors the head of each method holds, so that one with too many or too few is refused before it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Size, Tensor, nn

from parlay.drafters import options as methods
from parlay.heads import ngrams
from parlay.heads.artefact import BadHead, HeadArtefact
from parlay.heads.base import ParallelHeads, SeveralHeadsConfig
from parlay.heads.block import BlockConfig, BlockHead
from parlay.heads.blockwise import BlockwiseHeads
from parlay.heads.eagle import EagleHead
from parlay.heads.eagle3 import Eagle3Config, Eagle3Head
from parlay.heads.hydra import HydraHeads
from parlay.heads.kangaroo import KangarooAdapter
from parlay.heads.layouts.layout import EMBEDDING, LM_HEAD
from parlay.heads.medusa import MedusaHeads
from parlay.heads.mlp_speculator import MlpSpeculator
from parlay.heads.mtp import MtpModule
from parlay.heads.probes import PrefixedProbes, ProbeEmbeddings, Streams
from parlay.heads.redrafter import ReDrafterHead

_OPTIONAL = frozenset({LM_HEAD, EMBEDDING, "t2d"})
"""The target's may stand for the first two, and no drafter reads the third."""
_COUNTED = frozenset(f"ngrams.{size + 1}" for size in range(ngrams.LONGEST))


def check_tensors(held: HeadArtefact) -> None:
    """Raises BadHead, with names, for tensors that are missing, left over, or of another shape than the config says.

    Nothing is asked of methods that are not Parlay's own.
    """
    if held.method not in _MODULES:
        return
    expected = _expected(held)
    counted = _COUNTED if held.method in _COUNTING else frozenset()
    found = held.operands
    missing = (expected.keys() | counted) - found.keys() - _OPTIONAL
    extra = found.keys() - expected.keys() - counted - _OPTIONAL
    shaped = [name for name, shape in expected.items() if name in found and tuple(found[name].shape) != tuple(shape)]
    for names, what in ((missing, "lacks"), (extra, "does not know"), (shaped, "has in another shape")):
        if names:
            raise BadHead(f"a head for {held.method} {what} {_listed(names)}: the folder is incomplete or was changed")


def _expected(held: HeadArtefact) -> Mapping[str, Size]:
    try:
        with torch.device("meta"):
            module = _MODULES[held.method](held)
    except (KeyError, TypeError, ValueError) as error:
        raise BadHead(f"a head for {held.method} lacks a setting, or has one of another kind: {error}") from error
    return {name: each.shape for name, each in module.state_dict().items()}


def _listed(names: set[str] | frozenset[str] | list[str], most: int = 4) -> str:
    first = sorted(names)[:most]
    return ", ".join(first) + (f" and {len(names) - most} more" if len(names) > most else "")


def _draft_vocab(held: HeadArtefact) -> int:
    return int(held.settings["draft_vocab_size"])


def _eagle(held: HeadArtefact) -> nn.Module:
    return EagleHead(held.layer, _draft_vocab(held))


def _mtp(held: HeadArtefact) -> nn.Module:
    return _parallel(held) if "heads" in held.settings else MtpModule.of(held)


def _parallel(held: HeadArtefact) -> nn.Module:
    return ParallelHeads(held.layer, _draft_vocab(held), int(held.settings["heads"]))


def _probes(held: HeadArtefact) -> nn.Module:
    return ProbeEmbeddings(_first_inputs(held), _draft_vocab(held), held.layer.vocab_size)


def _prefixed(held: HeadArtefact) -> nn.Module:
    layer = held.layer
    states = torch.zeros(layer.num_layers, 2, layer.num_kv_heads, int(held.settings["prefix"]), layer.head_dim)
    return PrefixedProbes(_first_inputs(held), states, _draft_vocab(held), layer.vocab_size)


def _streams(held: HeadArtefact) -> nn.Module:
    return Streams(_first_inputs(held), int(held.settings["rank"]), _draft_vocab(held), held.layer.vocab_size)


def _first_inputs(held: HeadArtefact) -> Tensor:
    return torch.zeros(len(held.settings["acceptance"]), held.layer.hidden_size)


_COUNTING = frozenset({methods.BLOCKWISE, methods.DYNAMO})
_MODULES: Mapping[str, Callable[[HeadArtefact], nn.Module]] = {
    methods.BITA: _prefixed,
    methods.BLOCK_DRAFTER: lambda held: BlockHead(BlockConfig.of(held)),
    methods.BLOCKWISE: BlockwiseHeads.of,
    methods.DYNAMO: _parallel,
    methods.EAGLE: _eagle,
    methods.EAGLE3: lambda held: Eagle3Head(Eagle3Config.of(held)),
    methods.HYDRA: HydraHeads.of,
    methods.KANGAROO: lambda held: KangarooAdapter(held.layer, _draft_vocab(held)),
    methods.MEDUSA: lambda held: MedusaHeads(SeveralHeadsConfig.of(held)),
    methods.MLP_SPECULATOR: MlpSpeculator.of,
    methods.MTP: _mtp,
    methods.PASS: _probes,
    methods.PPD: _probes,
    methods.REDRAFTER: lambda held: ReDrafterHead(SeveralHeadsConfig.of(held)),
    methods.STREAMING: _streams,
}
