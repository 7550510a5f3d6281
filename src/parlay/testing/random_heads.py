"""Draft heads with random weights for any target. Their drafts are mostly wrong, and no text may depend on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from parlay.drafters import options as methods
from parlay.heads import ngrams
from parlay.heads.artefact import HeadArtefact
from parlay.heads.base import DraftVocab, ParallelHeads, SeveralHeadsConfig, SeveralHeadsModule
from parlay.heads.block import BlockConfig, BlockHead
from parlay.heads.blockwise import BlockwiseHeads
from parlay.heads.eagle import EagleHead
from parlay.heads.eagle3 import Eagle3Config, Eagle3Head
from parlay.heads.hydra import HydraHeads
from parlay.heads.kangaroo import KangarooAdapter
from parlay.heads.medusa import MedusaHeads
from parlay.heads.mlp_speculator import MlpSpeculator
from parlay.heads.mtp import MtpModule
from parlay.heads.opening import FindHead, OpenHead
from parlay.heads.probes import PrefixedProbes, ProbeEmbeddings, Streams
from parlay.heads.redrafter import ReDrafterHead
from parlay.models.config import DecoderConfig
from parlay.models.native import NativeRunner
from parlay.models.weights.fused import Operand
from parlay.types import RunnerSpec


def random_heads(target: RunnerSpec, seed: int = 0) -> FindHead:
    """Return a function that makes a head for each method. A head can draft half of the vocabulary.

    For methods with two forms, the head's name chooses one: `PLUS` for Hydra++, `PARALLEL` for MTP with parallel heads.
    Any other name gives the first form.
    """

    def find(method: str, name: str) -> OpenHead:
        torch.manual_seed(seed)
        artefact = _NAMED.get((method, name), _MAKERS.get(method, _several))(target, method)
        return OpenHead(artefact, torch.randn(target.vocab_size, target.hidden_size), _runner, torch.float32)

    return find


def _eagle3(target: RunnerSpec, method: str) -> HeadArtefact:
    head = random_eagle3(target)
    _disturb(head)
    head.fc.weight.data /= _LARGE
    return _artefact(method, head, head.config.layer, {"taps": list(head.config.taps)})


def _block(target: RunnerSpec, method: str) -> HeadArtefact:
    head = random_block(target)
    _disturb(head)
    head.fc.weight.data /= _LARGE
    config = head.config
    sizes = {"layers": config.layers, "length": config.length, "mask_id": config.mask_id}
    return _artefact(method, head, config.layer, {"taps": list(config.taps), **sizes})


def _next_states(target: RunnerSpec, method: str) -> HeadArtefact:
    head = random_next_states(target, method)
    _disturb(head)
    if isinstance(head, EagleHead):
        head.fc.weight.data[:, target.hidden_size :] /= _LARGE
    return _artefact(method, head, head.config, {"taps": [target.num_layers], "acceptance": _ACCEPTANCE})


def _several(target: RunnerSpec, method: str) -> HeadArtefact:
    """Make three heads."""
    config = _several_config(target)
    heads = _SEVERAL[method](config)
    heads.set_draft_vocab(torch.arange(config.draft_vocab_size) * 2)
    _disturb(heads)
    settings = {"taps": [target.num_layers], "heads": config.heads, "acceptance": _ACCEPTANCE}
    return _artefact(method, heads, _layer(target), settings)


def _hydra_plus(target: RunnerSpec, method: str) -> HeadArtefact:
    heads = HydraHeads(_several_config(target), _layer(target))
    heads.set_draft_vocab(torch.arange(len(heads.d2t)) * 2)
    _disturb(heads)
    settings = {"taps": [target.num_layers], "heads": len(heads.heads), "acceptance": _ACCEPTANCE, "plus": True}
    return _artefact(method, heads, _layer(target), settings)


def _blockwise(target: RunnerSpec, method: str) -> HeadArtefact:
    heads = BlockwiseHeads(_several_config(target), _layer(target).intermediate_size)
    heads.set_draft_vocab(torch.arange(len(heads.d2t)) * 2)
    _disturb(heads)
    settings = {"taps": [target.num_layers], "heads": len(heads.heads), "acceptance": _ACCEPTANCE}
    made = _artefact(method, heads, _layer(target), settings)
    counted = ngrams.count([torch.randint(target.vocab_size, (200,)).tolist()])
    return replace(made, tensors={**made.tensors, **counted})


def _kangaroo(target: RunnerSpec, method: str) -> HeadArtefact:
    adapter = KangarooAdapter(_layer(target), _draft_vocab(target))
    adapter.set_draft_vocab(torch.arange(_draft_vocab(target)) * 2)
    _disturb(adapter)
    return _artefact(method, adapter, adapter.config, {"taps": [1]})


def _probes(target: RunnerSpec, method: str) -> HeadArtefact:
    probes = ProbeEmbeddings(torch.randn(2, target.hidden_size), _draft_vocab(target), target.vocab_size)
    probes.set_draft_vocab(torch.arange(_draft_vocab(target)) * 2)
    return _artefact(method, probes, _layer(target), {"acceptance": _ACCEPTANCE[:2]})


def _prefixed(target: RunnerSpec, method: str) -> HeadArtefact:
    own = replace(_layer(target), num_layers=target.num_layers, num_kv_heads=target.kv_heads, head_dim=target.head_dim)
    states = torch.randn(own.num_layers, 2, own.num_kv_heads, 3, own.head_dim)
    probes = PrefixedProbes(torch.randn(2, own.hidden_size), states, _draft_vocab(target), target.vocab_size)
    probes.set_draft_vocab(torch.arange(_draft_vocab(target)) * 2)
    return _artefact(method, probes, own, {"acceptance": _ACCEPTANCE[:2], "prefix": 3})


def _streams(target: RunnerSpec, method: str) -> HeadArtefact:
    streams = Streams(torch.randn(2, target.hidden_size), 3, _draft_vocab(target), target.vocab_size)
    streams.set_draft_vocab(torch.arange(_draft_vocab(target)) * 2)
    _disturb(streams)
    join = target.num_layers // 2
    return _artefact(method, streams, _layer(target), {"acceptance": _ACCEPTANCE[:2], "rank": 3, "join": join})


def _parallel(target: RunnerSpec, method: str) -> HeadArtefact:
    heads = ParallelHeads(_layer(target), _draft_vocab(target), len(_ACCEPTANCE))
    heads.set_draft_vocab(torch.arange(_draft_vocab(target)) * 2)
    _disturb(heads)
    return _artefact(method, heads, heads.config, {"taps": [target.num_layers], "heads": len(heads.blocks)})


def _dynamo(target: RunnerSpec, method: str) -> HeadArtefact:
    made = _parallel(target, method)
    kept = {name: each for name, each in made.tensors.items() if not name.startswith("blocks.2.")}
    counted = ngrams.count([torch.randint(target.vocab_size, (200,)).tolist()])
    return replace(made, settings={**made.settings, "heads": 2}, tensors={**kept, **counted})


PLUS, PARALLEL = "plus", "parallel"
_NAMED = {(methods.HYDRA, PLUS): _hydra_plus, (methods.MTP, PARALLEL): _parallel}
_MAKERS = {
    methods.BITA: _prefixed,
    methods.BLOCK_DRAFTER: _block,
    methods.BLOCKWISE: _blockwise,
    methods.DYNAMO: _dynamo,
    methods.EAGLE: _next_states,
    methods.EAGLE3: _eagle3,
    methods.KANGAROO: _kangaroo,
    methods.MTP: _next_states,
    methods.PASS: _probes,
    methods.PPD: _probes,
    methods.STREAMING: _streams,
}
_SEVERAL: Mapping[str, Callable[[SeveralHeadsConfig], SeveralHeadsModule]] = {
    methods.HYDRA: HydraHeads,
    methods.MEDUSA: MedusaHeads,
    methods.MLP_SPECULATOR: MlpSpeculator,
    methods.REDRAFTER: ReDrafterHead,
}
_ACCEPTANCE = [[0.5, 0.2, 0.1], [0.4, 0.2, 0.1], [0.3, 0.2, 0.1]]
_LARGE = 64.0  # a divisor, because toys' hidden states are large numbers


def _artefact(method: str, head: DraftVocab, layer: DecoderConfig, settings: Mapping[str, Any]) -> HeadArtefact:
    settings = {**settings, "draft_vocab_size": len(head.d2t)}
    return HeadArtefact(method, layer, settings, dict(head.state_dict()), torch.zeros(0))


def _disturb(head: nn.Module) -> None:
    """Fill the matrices of a head with random numbers."""
    with torch.no_grad():
        for weight in head.parameters():
            if weight.ndim == 2:
                weight.normal_(0, weight.shape[1] ** -0.5)


def random_eagle3(target: RunnerSpec) -> Eagle3Head:
    """Make a head with PyTorch's usual initial weights."""
    config = Eagle3Config(_layer(target), _draft_vocab(target), (1, target.num_layers - 1))
    head = Eagle3Head(config)
    head.set_draft_vocab(torch.arange(config.draft_vocab_size) * 2)
    return head


def random_block(target: RunnerSpec) -> BlockHead:
    """Make a head with PyTorch's usual initial weights; the feature of mask rows is random."""
    config = BlockConfig(_layer(target), _draft_vocab(target), (1, target.num_layers - 1), 2, 4, target.vocab_size - 1)
    head = BlockHead(config)
    head.set_draft_vocab(torch.arange(config.draft_vocab_size) * 2)
    torch.nn.init.normal_(head.mask_hidden)
    return head


def random_next_states(target: RunnerSpec, method: str) -> EagleHead | MtpModule:
    """Make a head with PyTorch's usual initial weights."""
    made = EagleHead if method == methods.EAGLE else MtpModule
    head = made(_layer(target), _draft_vocab(target))
    head.set_draft_vocab(torch.arange(_draft_vocab(target)) * 2)
    return head


def _several_config(target: RunnerSpec) -> SeveralHeadsConfig:
    return SeveralHeadsConfig(target.hidden_size, target.vocab_size, _draft_vocab(target), len(_ACCEPTANCE))


def _draft_vocab(target: RunnerSpec) -> int:
    return max(target.vocab_size // 2, 2)


def _layer(target: RunnerSpec) -> DecoderConfig:
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=2 * target.hidden_size,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        rms_norm_eps=1e-6,
        max_context=target.max_context,
    )


def _runner(config: DecoderConfig, weights: Mapping[str, Operand]) -> NativeRunner:
    return NativeRunner(
        config, weights, dtype=torch.float32, device=torch.device("cpu"), max_tokens_cached=16_384, name="head"
    )
