"""EAGLE-3 as SafeAILab, SpecForge and vLLM use it: a Llama or Qwen3 config with ``draft_vocab_size``.

The tensors are ``fc``, ``midlayer`` (or ``layers.0``), ``norm``, ``lm_head``, and ``d2t`` and ``t2d``, which map draft
tokens to the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from parlay.heads.artefact import BadHead, HeadArtefact
from parlay.heads.eagle3 import NORMED
from parlay.heads.layouts.layout import (
    Foreign,
    Json,
    Layout,
    TargetShape,
    decoder_layer,
    offset_ids,
    published_head,
    renamed,
)
from parlay.models.config import DecoderConfig

TAPS = "eagle_aux_hidden_state_layer_ids"


def architecture_of(names: frozenset[str]) -> str:
    """Return the architecture of the layers: Qwen3 if queries and keys have norms, else Llama."""
    return "Qwen3ForCausalLM" if any(name.endswith("q_norm.weight") for name in names) else "LlamaForCausalLM"


def taps_of(foreign: Foreign, declared: Sequence[int] | None, target: TargetShape) -> list[int]:
    """Return the layers whose inputs are fused: ``declared``, or EAGLE-3's usual 2, L / 2 and L - 3.

    Raises BadHead for layers that the target lacks.
    """
    layers = target.num_layers
    found = sorted(declared or (2, layers // 2, layers - 3))
    if len(set(found)) < len(found) or found[0] < 0 or found[-1] >= layers:
        raise BadHead(f"{foreign.folder}: {TAPS} {found} are not layers below the last of a target that has {layers}")
    return found


def fused_head(
    method: str,
    foreign: Foreign,
    layer: DecoderConfig,
    target: TargetShape,
    tensors: Mapping[str, Tensor],
    *,
    fused: Sequence[int] | None,
    settings: Json,
) -> HeadArtefact:
    """Make a head that fuses the target's layers ``fused`` (None: the usual ones), and may have a smaller
    vocabulary."""
    config = foreign.config
    size = foreign.number({"draft_vocab_size": layer.vocab_size, **config}, "draft_vocab_size")
    ids_D = offset_ids(foreign, size, layer.vocab_size)
    usual = {"taps": taps_of(foreign, fused, target), NORMED: bool(config.get("norm_before_residual"))}
    return published_head(method, layer, target, tensors, settings={**usual, **settings}, ids_D=ids_D)


def plain(foreign: Foreign, declared: Json) -> None:
    """Raise BadHead for variants of EAGLE-3 that Parlay does not run."""
    foreign.require(declared, norm_before_fc=False, fc_norm=False, norm_output=False, use_aux_hidden_state=True)
    foreign.require(declared, target_hidden_size=declared.get("hidden_size"))


def _recognises(config: Json, names: frozenset[str]) -> bool:
    published = "Eagle3" in str(config.get("architectures")) or "draft_vocab_size" in config
    return published and "speculators_model_type" not in config


def _read(foreign: Foreign, target: TargetShape) -> HeadArtefact:
    config = foreign.config
    nested = config.get("eagle_config") or {}
    foreign.require(config, num_hidden_layers=1, parallel_drafting=False)
    plain(foreign, {**config, **nested})
    layer = decoder_layer(foreign, config, target, architecture_of(frozenset(foreign.tensors)))
    # The nested field counts layers by their outputs, the other one by their inputs.
    declared = [place + 1 for place in nested[TAPS]] if nested.get(TAPS) else config.get(TAPS)
    tensors = renamed(foreign.tensors, ("layers.0.", "midlayer."))
    return fused_head("eagle3", foreign, layer, target, tensors, fused=declared, settings={})


EAGLE3 = Layout("EAGLE-3", _recognises, _read)
