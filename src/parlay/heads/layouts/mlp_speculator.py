"""IBM's MLP speculator as IBM publishes it and vLLM reads it: ``model_type`` mlp_speculator.

For each step tensors ``emb``, ``proj``, ``ln`` and ``head``. With ``tie_weights`` all steps share these, but for the
first ``proj``, whether the file repeats them or not.
"""

from __future__ import annotations

from dataclasses import asdict

import torch

from parlay.heads.artefact import BadHead, HeadArtefact
from parlay.heads.layouts.layout import (
    NO_WITNESS,
    Foreign,
    Json,
    Layout,
    plain_layer,
    renamed,
    usual_acceptance,
    with_draft_vocab,
)
from parlay.heads.mlp_speculator import FORM, SpeculatorForm
from parlay.types import RunnerSpec

_MOST_STEPS = 64


def _recognises(config: Json, names: frozenset[str]) -> bool:
    return config.get("model_type") == "mlp_speculator"


def _read(foreign: Foreign, target: RunnerSpec) -> HeadArtefact:
    config = foreign.config
    foreign.require(config, vocab_size=target.vocab_size, emb_dim=target.hidden_size)
    steps = foreign.number(config, "n_predict")
    if steps > _MOST_STEPS:
        raise foreign.refuse("n_predict", steps, f"at most {_MOST_STEPS}")
    inner = int(config.get("inner_dim") or target.hidden_size)
    tied = bool(config.get("tie_weights"))
    form = SpeculatorForm(inner, rms=True, tied=tied, scaled=bool(config.get("scale_input")))
    held = renamed(foreign.tensors, ("speculator.", ""))
    tensors = {}
    for name, own in _names(steps, tied).items():
        first = f"{name.partition('.')[0]}.0.{name.rpartition('.')[2]}"
        found = held.get(name, held.get(first) if tied and not name.startswith("proj") else None)
        if found is None:
            raise BadHead(f"{foreign.folder} lacks {name}: the folder is incomplete")
        tensors[own] = found
    tensors.setdefault("later.weight", torch.zeros(inner, inner))  # of one step alone
    tensors |= {name: each for name, each in held.items() if not name.startswith(("emb.", "proj.", "ln.", "head."))}
    settings = {
        "taps": [target.num_layers],
        "draft_vocab_size": target.vocab_size,
        "heads": steps,
        "acceptance": usual_acceptance(steps),
        FORM: asdict(form),
    }
    ids_D = torch.arange(target.vocab_size)
    tensors = with_draft_vocab(tensors, ids_D, target.vocab_size)
    return HeadArtefact("mlp-speculator", plain_layer(target), settings, tensors, NO_WITNESS)


def _names(steps: int, tied: bool) -> dict[str, str]:
    """What each tensor of the file is here."""
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
