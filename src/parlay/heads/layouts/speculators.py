"""The format of the package `speculators`, which vLLM serves: EAGLE-3, P-EAGLE, and modules of multi-token prediction.

``transformer_layer_config`` is the layers' config without what is the default of its model type, ``speculators_config``
names the verifier, which is the target. EAGLE-3's layers are ``layers.N``, a module's is ``mtp_layers.0``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from parlay.heads.artefact import BadHead, HeadArtefact, Origin
from parlay.heads.eagle3 import NORMED
from parlay.heads.layouts.eagle3 import TAPS, plain, taps_of
from parlay.heads.layouts.layout import (
    LM_HEAD,
    NO_WITNESS,
    Foreign,
    Json,
    Layout,
    TargetShape,
    decoder_layer,
    offset_ids,
    renamed,
    with_draft_vocab,
)
from parlay.heads.mtp import NORMED as MTP_NORMED
from parlay.models.config import DecoderConfig

LAYER = "transformer_layer_config"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_USUAL: Mapping[str, Json] = {
    "llama": {"intermediate_size": 11008, "max_position_embeddings": 2048, "vocab_size": 32_000},
    "qwen3": {"intermediate_size": 22016, "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151_936},
}
"""What transformers takes where a config of this model type says nothing, beside `_ALWAYS`."""
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
    layer, said = _layer(foreign, target)
    return reader(foreign, layer, said, target)


def _layer(foreign: Foreign, target: TargetShape) -> tuple[DecoderConfig, dict[str, Any]]:
    """The shape of the layers, and all that their config says."""
    said = foreign.config.get(LAYER)
    if not isinstance(said, dict):
        raise BadHead(f"{foreign.folder}: config.json has no {LAYER}")
    kind = said.get("model_type", "qwen3")
    if kind not in ARCHITECTURES:
        raise foreign.refuse(f"{LAYER} model_type", kind, f"one of {', '.join(ARCHITECTURES)}")
    said = {**_ALWAYS, **_USUAL[kind], **said, "model_type": kind}
    if "sliding_attention" in (said.get("layer_types") or ()):
        raise foreign.refuse("layer_types", said["layer_types"], "full_attention")
    return decoder_layer(foreign, said, target, ARCHITECTURES[kind]), said


def _common(
    foreign: Foreign, layer: DecoderConfig, target: TargetShape
) -> tuple[dict[str, Any], Callable[[Mapping[str, Tensor]], dict[str, Tensor]]]:
    """Settings of EAGLE-3 and P-EAGLE, and what adds their draft vocabulary to tensors."""
    config = foreign.config
    plain(foreign, {**config, "hidden_size": layer.hidden_size})
    size = foreign.number({"draft_vocab_size": layer.vocab_size, **config}, "draft_vocab_size")
    ids_D = offset_ids(foreign, size, layer.vocab_size)
    settings = {
        "taps": taps_of(foreign, config.get(TAPS), target),
        "draft_vocab_size": size,
        NORMED: bool(config.get("norm_before_residual")),
    }
    return settings, lambda tensors: with_draft_vocab(tensors, ids_D, layer.vocab_size)


def _eagle3(foreign: Foreign, layer: DecoderConfig, said: Json, target: TargetShape) -> HeadArtefact:
    foreign.require(said, num_hidden_layers=1)
    settings, with_vocab = _common(foreign, layer, target)
    tensors = with_vocab(renamed(foreign.tensors, ("layers.0.", "midlayer.")))
    return HeadArtefact("eagle3", layer, settings, tensors, NO_WITNESS, _origin(foreign))


def _peagle(foreign: Foreign, layer: DecoderConfig, said: Json, target: TargetShape) -> HeadArtefact:
    settings, with_vocab = _common(foreign, layer, target)
    sizes = {
        "layers": foreign.number(said, "num_hidden_layers"),
        "mask_id": foreign.number(foreign.config, "mask_token_id", least=0),
        "length": foreign.number(_proposal(foreign), "speculative_tokens"),
    }
    if sizes["mask_id"] >= layer.vocab_size:
        raise foreign.refuse("mask_token_id", sizes["mask_id"], f"a token of {layer.vocab_size}")
    tensors = with_vocab(renamed(foreign.tensors))
    if "mask_hidden" in tensors:
        tensors["mask_hidden"] = tensors["mask_hidden"].flatten()
    return HeadArtefact("block-drafter", layer, {**settings, **sizes}, tensors, NO_WITNESS, _origin(foreign))


def _mtp(foreign: Foreign, layer: DecoderConfig, said: Json, target: TargetShape) -> HeadArtefact:
    del said  # the number of layers is the target's
    foreign.require(foreign.config, num_nextn_predict_layers=1)
    settings = {"taps": [target.num_layers], "draft_vocab_size": layer.vocab_size, MTP_NORMED: True}
    tensors = {name: each for name, each in foreign.tensors.items() if name != LM_HEAD}  # it is the verifier's
    tensors = with_draft_vocab(renamed(tensors, *MTP_NAMES), torch.arange(layer.vocab_size), layer.vocab_size)
    return HeadArtefact("mtp", layer, settings, tensors, NO_WITNESS, _origin(foreign))


def _proposal(foreign: Foreign) -> Json:
    try:
        found: Json = foreign.config["speculators_config"]["proposal_methods"][0]
        return {**found}
    except (KeyError, IndexError, TypeError) as error:
        raise BadHead(f"{foreign.folder}: speculators_config names no proposal method") from error


def _origin(foreign: Foreign) -> Origin:
    """With the target that the file names."""
    said = foreign.config.get("speculators_config")
    verifier = said.get("verifier") if isinstance(said, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return Origin(target=str(name or ""))


_READERS = {"eagle3": _eagle3, "peagle": _peagle, "mtp": _mtp}
SPECULATORS = Layout("speculators", lambda config, names: "speculators_model_type" in config, _read)
