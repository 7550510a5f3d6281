"""Hydra as its paper's code saves it, after its pickle was converted: ``hydra_mlp`` and ``hydra_lm_head``.

A head of several layers runs one layer repeatedly, which the file holds once per repetition.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from parlay.heads.artefact import HeadArtefact
from parlay.heads.hydra import PUBLISHED
from parlay.heads.layouts.layout import MOST_HEADS, Foreign, Json, Layout, TargetShape, several_heads

_MOST_LAYERS = 64
_MLP = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)")
_LM_HEAD = re.compile(r"hydra_lm_head\.(\d+)\.(weight|bias)")


def _recognises(config: Json, names: frozenset[str]) -> bool:
    return "hydra_num_heads" in config


def _read(foreign: Foreign, target: TargetShape) -> HeadArtefact:
    config = foreign.config
    foreign.require(config, hydra_head_arch="mlp", grounded_heads=True, hidden_state_offset=0)
    heads = foreign.number(config, "hydra_num_heads", most=MOST_HEADS)
    layers = foreign.number(config, "hydra_num_layers", most=_MOST_LAYERS)
    tensors = _own(foreign, layers)
    if layers == 1:  # no layer is repeated
        size = target.hidden_size
        nothing = {"weight": torch.zeros(size, size), "bias": torch.zeros(size)}
        tensors |= {f"heads.{head}.inner.{part}": each for head in range(heads) for part, each in nothing.items()}
    return several_heads("hydra", target, heads, tensors, settings={PUBLISHED: layers})


def _own(foreign: Foreign, layers: int) -> dict[str, Tensor]:
    """Return the tensors under Parlay's names. Raises BadHead for a layer that does not repeat the layer before."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in foreign.tensors.items():
        own = _named(name.removeprefix("hydra_head."), layers)
        if own in tensors and not torch.equal(tensors[own], tensor):
            raise foreign.refuse(name, "another matrix than that of the layer above", "the same")
        tensors[own] = tensor
    return tensors


def _named(name: str, layers: int) -> str:
    """Return Parlay's name for a tensor of the file, or the same name if there is none."""
    if match := _MLP.fullmatch(name):
        head, layer, kind, part = match.groups()
        first = {"linear": "mix", "res_connection": "shorten"}[kind]
        own = first if layer == "0" else "inner" if kind == "linear" and int(layer) < layers else ""
        return f"heads.{head}.{own}.{part}" if own else name
    match = _LM_HEAD.fullmatch(name)
    return f"heads.{match[1]}.lm_head.{match[2]}" if match else name


HYDRA = Layout("Hydra", _recognises, _read)
