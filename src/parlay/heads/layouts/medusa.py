"""Medusa as vLLM reads it: ``model_type`` medusa, tensors ``blocks`` and ``lm_heads``, and ``token_map``.

``token_map`` lists the tokens of a smaller vocabulary. The paper's code instead names tensors by numbers, in pickles;
converted pickles are read, too.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from parlay.heads.artefact import HeadArtefact
from parlay.heads.layouts.layout import MOST_HEADS, Foreign, Json, Layout, TargetShape, checked_ids, several_heads

_NUMBERED = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")


def _recognises(config: Json, names: frozenset[str]) -> bool:
    return config.get("model_type") == "medusa" or "medusa_num_heads" in config


def _read(foreign: Foreign, target: TargetShape) -> HeadArtefact:
    config = foreign.config
    declared = {"num_heads": config.get("medusa_num_heads"), "num_hidden_layers": config.get("medusa_num_layers")}
    declared = {**declared, "vocab_size": target.vocab_size, "hidden_size": target.hidden_size, **config}
    foreign.require(declared, num_hidden_layers=1, logit_scale=1.0)
    foreign.require(declared, vocab_size=target.vocab_size, hidden_size=target.hidden_size)
    heads = foreign.number(declared, "num_heads", most=MOST_HEADS)
    tensors = dict(map(_named, foreign.tensors.items()))
    ids_D = _draft_ids(foreign, tensors.pop("token_map", None), target.vocab_size)
    shared = (
        tensors.pop("lm_head.weight", tensors.get("lm_heads.0.weight")) if declared.get("original_lm_head") else None
    )
    for head in range(heads):
        tensors.setdefault(f"blocks.{head}.linear.bias", torch.zeros(target.hidden_size))
        if shared is not None:
            tensors[f"lm_heads.{head}.weight"] = shared
    # The rows of the draft vocabulary; some files have those of all tokens.
    rows = {
        name: (each[ids_D] if len(each) == target.vocab_size else each)
        for name, each in tensors.items()
        if "lm_heads" in name
    }
    return several_heads("medusa", target, heads, {**tensors, **rows}, settings={}, ids_D=ids_D)


def _named(entry: tuple[str, Tensor]) -> tuple[str, Tensor]:
    """Rename a tensor; each head has one residual block."""
    name, tensor = entry
    numbers = _NUMBERED.fullmatch(name)
    if numbers is not None:
        head, place, linear, part = numbers.groups()
        return (f"blocks.{head}.layers.{place}.{part}" if linear else f"lm_heads.{head}.{part}").replace(
            ".layers.0.", ".linear."
        ), tensor
    return name.removeprefix("medusa_heads.").replace(".layers.0.", ".linear."), tensor


def _draft_ids(foreign: Foreign, token_map: Tensor | None, vocab_size: int) -> Tensor:
    """Return the target's token for each draft id: from ``token_map`` ``[D]``, else all tokens."""
    if token_map is None or token_map.is_floating_point() or token_map.dim() != 1:
        foreign.require(foreign.config, truncated_vocab_size=vocab_size)
        return torch.arange(vocab_size)
    foreign.require(foreign.config, truncated_vocab_size=len(token_map))
    return checked_ids(foreign, "token_map", token_map.long(), vocab_size)


MEDUSA = Layout("Medusa", _recognises, _read)
