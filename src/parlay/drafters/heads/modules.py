"""The tensors that a head of each method must have, so that a wrong file is refused before it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Size, Tensor, nn

from parlay.drafters import options as methods
from parlay.heads import ngrams
from parlay.heads.artefact import BadHead, HeadArtefact
from parlay.heads.base import ParallelHeads, SeveralHeadsConfig, draft_ids
from parlay.heads.block import BlockConfig, BlockHead
from parlay.heads.blockwise import BlockwiseHeads
from parlay.heads.eagle import EagleHead
from parlay.heads.eagle3 import Eagle3Config, Eagle3Head
from parlay.heads.hydra import PUBLISHED, HydraHeads
from parlay.heads.kangaroo import KangarooAdapter
from parlay.heads.layouts.layout import EMBEDDING, LM_HEAD, NEED_LM_HEAD
from parlay.heads.medusa import MedusaHeads
from parlay.heads.mlp_speculator import MlpSpeculator
from parlay.heads.mtp import MtpModule
from parlay.heads.probes import PrefixedProbes, ProbeEmbeddings, Streams
from parlay.heads.redrafter import ReDrafterHead

_OPTIONAL = frozenset({LM_HEAD, EMBEDDING, "t2d"})
"""The target's own tensors may replace the first two, and no drafter reads the third."""
_COUNTED = {f"ngrams.{size + 1}": size + 2 for size in range(ngrams.LONGEST)}
"""Tensors with counts of n-grams, and how many columns each has."""
_COUNTS = {"heads": 64, "layers": 64, "length": 256, "prefix": 4096, "rank": 4096}
"""Settings that are counts, and the largest sensible value of each; larger ones would cost too much time and memory."""
_MOST_LAYERS, _MOST_LEVELS, _MOST_RANKS = 10_000, 64, 1024


def check_tensors(artefact: HeadArtefact) -> None:
    """Raises BadHead, with names, for tensors that are missing, unknown, or of another shape than the config says.

    Also for settings out of range, and for draft tokens that the target does not have, because kernels read its
    embedding there. Methods that are not Parlay's own are not checked.
    """
    if artefact.method not in _MODULES:
        return
    _check_settings(artefact)
    expected = _expected(artefact)
    if artefact.method in _WITH_LM_HEAD:  # kernels write a row's logits where there is room for its draft tokens
        expected = {LM_HEAD: Size((_draft_vocab(artefact), artefact.layer.hidden_size)), **expected}
    counted = _COUNTED if artefact.method in _COUNTING else {}
    found = artefact.operands
    missing = (expected.keys() | counted.keys()) - found.keys() - _OPTIONAL
    extra = found.keys() - expected.keys() - counted.keys() - _OPTIONAL
    shaped = [name for name, shape in expected.items() if name in found and tuple(found[name].shape) != tuple(shape)]
    shaped += [name for name in counted.keys() & found.keys() if tuple(found[name].shape[1:]) != (counted[name],)]
    for names, what in ((missing, "lacks"), (extra, "does not know"), (shaped, "has in another shape")):
        if names:
            raise BadHead(
                f"a head for {artefact.method} {what} {_listed(names)}: the folder is incomplete or was changed"
            )
    if "d2t" in expected:
        _check_draft_vocab(artefact, artefact.tensors["d2t"])


def _check_settings(artefact: HeadArtefact) -> None:
    """Raises BadHead for numbers out of range, before a module is built from them, which might never end."""
    vocab_size, settings = artefact.layer.vocab_size, artefact.settings
    counts = {name: (1, most) for name, most in _COUNTS.items()}
    counts |= {"draft_vocab_size": (1, vocab_size), "mask_id": (0, vocab_size - 1)}
    counts |= {PUBLISHED: (0, _COUNTS["layers"]), "join": (0, _MOST_LAYERS)}
    for name, (least, most) in counts.items():
        if name in settings and not _is_count(settings[name], least, most):
            raise _no_setting(artefact, name, f"a whole number from {least} to {most}")
    for name in _needed(artefact.method) - settings.keys():
        raise BadHead(f"a head for {artefact.method} lacks the setting {name}: the folder was changed")
    taps = _listed_in(settings, "taps", [0], _MOST_LAYERS)
    if not all(_is_count(tap, 0, _MOST_LAYERS) for tap in taps) or not 0 < len({*taps}) == len(taps):
        raise _no_setting(artefact, "taps", "different layers")
    if artefact.method == methods.KANGAROO and len(taps) > 1:
        raise _no_setting(artefact, "taps", "one layer")
    levels = _listed_in(settings, "acceptance", [[0.0]], _MOST_LEVELS)
    ranks = [_listed_in({}, "", level, _MOST_RANKS) for level in levels]
    if not ranks or not all(level and all(map(_is_share, level)) for level in ranks):
        raise _no_setting(artefact, "acceptance", f"shares by rank, for each of up to {_MOST_LEVELS} tokens")


def _needed(method: str) -> set[str]:
    """The settings that drafters read, beyond those that the modules read."""
    read = {"taps"} if method not in _PROBES else set()
    return read | {"acceptance"} if method in _PROBES | _STATIC else read


def _listed_in(settings: Mapping[str, Any], name: str, usual: object, most: int) -> Sequence[Any]:
    """The list of that name, or the default; empty if it is not a list, or has more than ``most`` entries."""
    found = settings.get(name, usual)
    return found if isinstance(found, list | tuple) and len(found) <= most else ()


def _is_count(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


def _no_setting(artefact: HeadArtefact, name: str, expected: str) -> BadHead:
    return BadHead(f"a head for {artefact.method} says {name} {artefact.settings[name]!s:.40}: expected {expected}")


def _check_draft_vocab(artefact: HeadArtefact, d2t_D: Tensor) -> None:
    """Raises BadHead unless ``d2t_D`` maps draft ids to tokens of the target."""
    ids_D = draft_ids(d2t_D) if d2t_D.dtype in (torch.int64, torch.int32) else torch.tensor([-1])
    if not 0 <= int(ids_D.min()) <= int(ids_D.max()) < artefact.layer.vocab_size:
        raise BadHead(
            f"a head for {artefact.method}: d2t does not name tokens of a target of {artefact.layer.vocab_size}"
        )


def _expected(artefact: HeadArtefact) -> Mapping[str, Size]:
    try:
        with torch.device("meta"):
            module = _MODULES[artefact.method](artefact)
    except (
        KeyError,
        TypeError,
        ValueError,
        ArithmeticError,
        RuntimeError,
    ) as error:  # RuntimeError: torch refuses a size
        raise BadHead(f"a head for {artefact.method} lacks a setting, or has one of another kind: {error}") from error
    return {name: each.shape for name, each in module.state_dict().items()}


def _listed(names: set[str] | frozenset[str] | list[str], most: int = 4) -> str:
    first = [name if name.isprintable() else repr(name) for name in sorted(names)[:most]]
    return ", ".join(first) + (f" and {len(names) - most} more" if len(names) > most else "")


def _draft_vocab(artefact: HeadArtefact) -> int:
    return int(artefact.settings["draft_vocab_size"])


def _eagle(artefact: HeadArtefact) -> nn.Module:
    return EagleHead(artefact.layer, _draft_vocab(artefact))


def _mtp(artefact: HeadArtefact) -> nn.Module:
    return _parallel(artefact) if "heads" in artefact.settings else MtpModule.of(artefact)


def _parallel(artefact: HeadArtefact) -> nn.Module:
    return ParallelHeads(artefact.layer, _draft_vocab(artefact), int(artefact.settings["heads"]))


def _probes(artefact: HeadArtefact) -> nn.Module:
    return ProbeEmbeddings(_first_inputs(artefact), _draft_vocab(artefact), artefact.layer.vocab_size)


def _prefixed(artefact: HeadArtefact) -> nn.Module:
    layer = artefact.layer
    states = torch.zeros(layer.num_layers, 2, layer.num_kv_heads, int(artefact.settings["prefix"]), layer.head_dim)
    return PrefixedProbes(_first_inputs(artefact), states, _draft_vocab(artefact), layer.vocab_size)


def _streams(artefact: HeadArtefact) -> nn.Module:
    return Streams(
        _first_inputs(artefact), int(artefact.settings["rank"]), _draft_vocab(artefact), artefact.layer.vocab_size
    )


def _first_inputs(artefact: HeadArtefact) -> Tensor:
    return torch.zeros(len(artefact.settings["acceptance"]), artefact.layer.hidden_size)


_COUNTING = frozenset({methods.BLOCKWISE, methods.DYNAMO})
_PROBES = frozenset({methods.BITA, methods.PASS, methods.PPD, methods.STREAMING})
_STATIC = frozenset({methods.EAGLE, methods.HYDRA, methods.MEDUSA, methods.MLP_SPECULATOR})
"""Methods whose trees are static."""
_WITH_LM_HEAD = NEED_LM_HEAD | _COUNTING | {methods.KANGAROO}
"""Methods whose drafters read an LM head, which may be the target's."""
_MODULES: Mapping[str, Callable[[HeadArtefact], nn.Module]] = {
    methods.BITA: _prefixed,
    methods.BLOCK_DRAFTER: lambda artefact: BlockHead(BlockConfig.of(artefact)),
    methods.BLOCKWISE: BlockwiseHeads.of,
    methods.DYNAMO: _parallel,
    methods.EAGLE: _eagle,
    methods.EAGLE3: lambda artefact: Eagle3Head(Eagle3Config.of(artefact)),
    methods.HYDRA: HydraHeads.of,
    methods.KANGAROO: lambda artefact: KangarooAdapter(artefact.layer, _draft_vocab(artefact)),
    methods.MEDUSA: lambda artefact: MedusaHeads(SeveralHeadsConfig.of(artefact)),
    methods.MLP_SPECULATOR: MlpSpeculator.of,
    methods.MTP: _mtp,
    methods.PASS: _probes,
    methods.PPD: _probes,
    methods.REDRAFTER: lambda artefact: ReDrafterHead(SeveralHeadsConfig.of(artefact)),
    methods.STREAMING: _streams,
}
