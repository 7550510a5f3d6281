"""EAGLE and EAGLE-2 as SafeAILab publishes them: the config of a one-layer Llama, and tensors ``fc`` and ``layers.0``.

The layer has no norm before its attention, and the LM head is the target's.
"""

from __future__ import annotations

import torch

from parlay.heads.artefact import HeadArtefact
from parlay.heads.layouts.layout import (
    Foreign,
    Json,
    Layout,
    TargetShape,
    decoder_layer,
    published_head,
    renamed,
    usual_acceptance,
)

_LEVELS = 5


def _recognises(config: Json, names: frozenset[str]) -> bool:
    return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names and "layers.0.hidden_norm.weight" not in names


def _read(foreign: Foreign, target: TargetShape) -> HeadArtefact:
    foreign.require(foreign.config, num_hidden_layers=1)
    layer = decoder_layer(foreign, foreign.config, target, "LlamaForCausalLM")
    tensors = renamed(foreign.tensors)
    tensors.setdefault("fc.bias", torch.zeros(layer.hidden_size))
    return published_head("eagle", layer, target, tensors, settings={"acceptance": usual_acceptance(_LEVELS)})


EAGLE = Layout("EAGLE", _recognises, _read)
