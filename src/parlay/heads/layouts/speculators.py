"""The format of the package `speculators`, which vLLM serves: EAGLE-3, P-EAGLE, and multi-token prediction.

``transformer_layer_config`` is the layers' config; fields with the model type's default value are left out.
``speculators_config`` names the verifier, which is the target. EAGLE-3's layers are called ``layers.N``, and an MTP
module's layer ``mtp_layers.0``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parlay.heads.artefact import BadHead, HeadArtefact, Origin
from parlay.heads.layouts.eagle3 import TAPS, fused_head, plain
from parlay.heads.layouts.layout import (
    LM_HEAD,
    Foreign,
    Json,
    Layout,
    TargetShape,
    decoder_layer,
    published_head,
    renamed,
)
from parlay.heads.mtp import NORMED
from parlay.models.config import DecoderConfig

LAYER = "transformer_layer_config"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_USUAL: Mapping[str, Json] = {
    "llama": {"intermediate_size": 11008, "max_position_embeddings": 2048, "vocab_size": 32_000},
    "qwen3": {"intermediate_size": 22016, "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151_936},
}
"""Defaults of transformers by model type; `_ALWAYS` has those of both types."""
_ALWAYS = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "rms_norm_eps": 1e-6}
MTP_NAMES = (
    ("mtp_layers.0.hidden_layernorm.", "hnorm."),
    ("mtp_layers.0.token_layernorm.", "enorm."),
    ("mtp_layers.0.input_proj.", "eh_proj."),
    ("mtp_layers.0.final_layernorm.", "norm."),
    ("mtp_layers.0.", "block."),
)


def _read(foreign: Foreign, target: TargetShape) -> HeadArtefact:
    kind = str(foreign.config["speculators_model_type"])
    reader = _READERS.get(kind)
    if reader is None:
        raise foreign.refuse("speculators_model_type", kind, f"one of {', '.join(_READERS)}")
    layer, declared = _layer(foreign, target)
    return replace(reader(foreign, layer, declared, target), origin=_origin(foreign))


def _layer(foreign: Foreign, target: TargetShape) -> tuple[DecoderConfig, dict[str, Any]]:
    """Return the shape of the layers, and their whole config."""
    declared = foreign.config.get(LAYER)
    if not isinstance(declared, dict):
        raise BadHead(f"{foreign.folder}: config.json has no {LAYER}")
    kind = declared.get("model_type", "qwen3")
    if kind not in ARCHITECTURES:
        raise foreign.refuse(f"{LAYER} model_type", kind, f"one of {', '.join(ARCHITECTURES)}")
    declared = {**_ALWAYS, **_USUAL[kind], **declared, "model_type": kind}
    if "sliding_attention" in (declared.get("layer_types") or ()):
        raise foreign.refuse("layer_types", declared["layer_types"], "full_attention")
    return decoder_layer(foreign, declared, target, ARCHITECTURES[kind]), declared


def _eagle3(foreign: Foreign, layer: DecoderConfig, declared: Json, target: TargetShape) -> HeadArtefact:
    config = foreign.config
    foreign.require(declared, num_hidden_layers=1)
    plain(foreign, {**config, "hidden_size": layer.hidden_size})
    tensors = renamed(foreign.tensors, ("layers.0.", "midlayer."))
    return fused_head("eagle3", foreign, layer, target, tensors, fused=config.get(TAPS), settings={})


def _peagle(foreign: Foreign, layer: DecoderConfig, declared: Json, target: TargetShape) -> HeadArtefact:
    config = foreign.config
    plain(foreign, {**config, "hidden_size": layer.hidden_size})
    sizes = {
        "layers": foreign.number(declared, "num_hidden_layers"),
        "mask_id": foreign.number(config, "mask_token_id", least=0),
        "length": foreign.number(_proposal(foreign), "speculative_tokens"),
    }
    if sizes["mask_id"] >= layer.vocab_size:
        raise foreign.refuse("mask_token_id", sizes["mask_id"], f"a token of {layer.vocab_size}")
    tensors = renamed(foreign.tensors)
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].flatten()
    return fused_head("block-drafter", foreign, layer, target, tensors, fused=config.get(TAPS), settings=sizes)


def _mtp(foreign: Foreign, layer: DecoderConfig, declared: Json, target: TargetShape) -> HeadArtefact:
    del declared  # the number of layers is the target's
    foreign.require(foreign.config, num_nextn_predict_layers=1)
    tensors = {name: each for name, each in foreign.tensors.items() if name != LM_HEAD}  # it is the verifier's
    return published_head("mtp", layer, target, renamed(tensors, *MTP_NAMES), settings={NORMED: True})


def _proposal(foreign: Foreign) -> Json:
    try:
        found: Json = foreign.config["speculators_config"]["proposal_methods"][0]
        return {**found}
    except (KeyError, IndexError, TypeError) as error:
        raise BadHead(f"{foreign.folder}: speculators_config names no proposal method") from error


def _origin(foreign: Foreign) -> Origin:
    """Return the origin, with the target that the file names."""
    declared = foreign.config.get("speculators_config")
    verifier = declared.get("verifier") if isinstance(declared, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return Origin(target=str(name or ""))


_READERS = {"eagle3": _eagle3, "peagle": _peagle, "mtp": _mtp}
SPECULATORS = Layout("speculators", lambda config, names: "speculators_model_type" in config, _read)
