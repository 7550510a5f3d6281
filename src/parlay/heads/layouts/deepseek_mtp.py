"""DeepSeek's multi-token prediction modules, published in the model's own files as layers after its last.

``num_nextn_predict_layers`` is their number. The tensors are ``enorm``, ``hnorm``, ``eh_proj``, ``shared_head``, and a
decoder layer's.
"""

from __future__ import annotations

from parlay.heads.artefact import BadHead, HeadArtefact
from parlay.heads.layouts.eagle3 import architecture_of
from parlay.heads.layouts.layout import Foreign, Json, Layout, TargetShape, decoder_layer, published_head, renamed
from parlay.heads.mtp import NORMED

_COUNT = "num_nextn_predict_layers"


def _prefix(config: Json) -> str:
    return f"model.layers.{config.get('num_hidden_layers')}."


def _recognises(config: Json, names: frozenset[str]) -> bool:
    return bool(config.get(_COUNT)) and "speculators_model_type" not in config


def _owns(config: Json, name: str) -> bool:
    return name.startswith(_prefix(config))


def _read(foreign: Foreign, target: TargetShape) -> HeadArtefact:
    config, prefix = foreign.config, _prefix(foreign.config)
    foreign.require(config, **{_COUNT: 1, "num_hidden_layers": target.num_layers})
    if not foreign.tensors:
        raise BadHead(f"{foreign.folder} says {_COUNT} 1, and lacks the tensors of that module, {prefix}*")
    for field in ("kv_lora_rank", "q_lora_rank"):
        foreign.require(config, **{field: "absent: its attention is not that of Llama"})
    if any(".mlp.experts." in name for name in foreign.tensors):
        raise foreign.refuse("n_routed_experts", config.get("n_routed_experts"), "absent: its layer has experts")
    layer = decoder_layer(foreign, config, target, architecture_of(frozenset(foreign.tensors)))
    tensors = renamed(
        foreign.tensors,
        (f"{prefix}shared_head.norm.", "norm."),
        (f"{prefix}shared_head.head.", "lm_head."),
        (f"{prefix}embed_tokens.", "embed_tokens."),
        *((f"{prefix}{name}.", f"{name}.") for name in ("enorm", "hnorm", "eh_proj")),
        (prefix, "block."),
    )
    return published_head("mtp", layer, target, tensors, settings={NORMED: True})


DEEPSEEK_MTP = Layout("DeepSeek MTP", _recognises, _read, _owns)
