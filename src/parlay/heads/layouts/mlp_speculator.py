"""IBM's MLP speculator as IBM publishes it and vLLM reads it: ``model_type`` mlp_speculator.

Each step has tensors ``emb``, ``proj``, ``ln`` and ``head``. With ``tie_weights``, all steps share them, except that
the first step has its own ``proj``. The file may still repeat shared tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch import Tensor

from parlay.heads.artefact import BadHead, HeadArtefact
from parlay.heads.layouts.layout import MOST_HEADS, Foreign, Json, Layout, TargetShape, renamed, several_heads
from parlay.heads.mlp_speculator import FORM, SpeculatorForm


def _recognises(config: Json, names: frozenset[str]) -> bool:
    return config.get("model_type") == "mlp_speculator"


def _read(foreign: Foreign, target: TargetShape) -> HeadArtefact:
    config = foreign.config
    foreign.require(config, vocab_size=target.vocab_size, emb_dim=target.hidden_size)
    steps = foreign.number(config, "n_predict", most=MOST_HEADS)
    inner = foreign.number({"inner_dim": target.hidden_size, **config}, "inner_dim", least=0) or target.hidden_size
    tied = bool(config.get("tie_weights"))
    form = SpeculatorForm(inner, rms=True, tied=tied, scaled=bool(config.get("scale_input")))
    tensors = _own(foreign, renamed(foreign.tensors, ("speculator.", "")), steps, tied)
    if tensors["first.weight"].shape[0] != inner:
        raise foreign.refuse("inner_dim", inner, f"{tensors['first.weight'].shape[0]}, as the tensors have it")
    tensors.setdefault("later.weight", torch.zeros(inner, inner))  # for a single step
    return several_heads("mlp-speculator", target, steps, tensors, settings={FORM: asdict(form)})


def _own(foreign: Foreign, tensors: Mapping[str, Tensor], steps: int, tied: bool) -> dict[str, Tensor]:
    """Return the tensors under Parlay's names; other tensors keep theirs. Raises BadHead if one is missing."""
    names = _names(steps, tied)
    found: dict[str, Tensor] = {}
    for name, own in names.items():
        place = _first(name) if tied and name not in tensors else name
        if place not in tensors:
            raise BadHead(f"{foreign.folder} lacks {name}: the folder is incomplete")
        found[own] = tensors[place]
    again = {
        name for name in tensors if tied and _first(name) in tensors and tensors[name].equal(tensors[_first(name)])
    }
    return {**found, **{name: tensors[name] for name in tensors.keys() - names.keys() - again}}


def _first(name: str) -> str:
    """Return the name of the tensor that this one repeats if steps share weights."""
    part, _, rest = name.partition(".")
    step, _, ending = rest.partition(".")
    return f"{part}.{min(int(step), 1) if part == 'proj' else 0}.{ending}" if step.isdigit() else name


def _names(steps: int, tied: bool) -> dict[str, str]:
    """Return Parlay's names by the names in the file."""
    found = {"emb.0.weight": "emb.weight", "proj.0.weight": "first.weight"}
    if steps > 1:
        found["proj.1.weight"] = "later.weight"
    for step in range(steps):
        found[f"head.{step}.weight"] = f"lm_heads.{step}.weight"
        found |= {f"ln.{step}.{part}": f"norms.{step}.{part}" for part in ("weight", "bias")}
        if step and not tied:
            found[f"emb.{step}.weight"] = f"more_embs.{step - 1}.weight"
        if step > 1 and not tied:
            found[f"proj.{step}.weight"] = f"more_later.{step - 2}.weight"
    return found


MLP_SPECULATOR = Layout("MLP speculator", _recognises, _read)
