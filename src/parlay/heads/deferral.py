"""Deferral heads on disk: folders that `parlay train defer` writes for a base model and an assistant."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parlay.heads.artefact import (
    CONFIG,
    BadHead,
    HeadArtefact,
    HeadFacts,
    Origin,
    check_target,
    load,
    read_facts,
    same_rows,
    save,
)
from parlay.heads.opening import matrices_of
from parlay.models.config import DecoderConfig
from parlay.models.ensembles.combining import Deferral
from parlay.options import user_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFER = "defer"
_ASSISTANT = "assistant.witness"


def witnesses(model: str | PreTrainedModel, vocab_size: int) -> Tensor:
    """Return the rows ``[W, H]`` of a model's embedding that identify it."""
    return matrices_of(model).witnesses(vocab_size)


def save_deferral(
    folder: Path,
    head: Deferral,
    base: tuple[DecoderConfig, Origin, Tensor],
    assistant: tuple[str, Tensor],
    card: str,
) -> None:
    """Write the folder of a deferral head.

    ``base``: the base model's shape, origin and `witnesses`. ``assistant``: the assistant's name and `witnesses`.
    """
    (layer, origin, base_WH), (name, assistant_WH) = base, assistant
    tensors = {"weight": head.weight_H, "bias": torch.tensor([head.bias]), _ASSISTANT: assistant_WH.flatten()}
    settings = {"assistant": name, "threshold": head.threshold}
    save(folder, HeadArtefact(DEFER, layer, settings, tensors, base_WH, origin), card)


def facts_of_deferral(folder: str) -> HeadFacts:
    """Read the config of a folder's deferral head. Raises BadHead if there is none, or a draft head."""
    path = user_path(folder)
    if not (path / CONFIG).is_file():
        raise BadHead(
            f"ensemble head {folder}: no folder of a head; train one with parlay train {DEFER}", "ensemble head"
        )
    facts = read_facts(path)
    if facts.method != DEFER:
        raise BadHead(
            f"ensemble head {folder}: a head for strategy {facts.method}, not one of parlay train {DEFER}",
            "ensemble head",
        )
    threshold = facts.settings.get("threshold")
    if not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
        raise BadHead(
            f"ensemble head {folder}: its threshold {threshold!r:.40} is not from 0 to 1: train it again",
            "ensemble head",
        )
    return facts


def open_deferral(
    folder: str, base: str | PreTrainedModel, assistant: str, vocab_sizes: tuple[int, int], threshold: float | None
) -> Deferral:
    """Load a head for these two models, whose vocabularies have these sizes; ``threshold`` replaces the saved one.

    Raises BadHead if the head was trained for other models.
    """
    found = facts_of_deferral(folder)
    head = load(user_path(folder))
    check_target(folder, head.layer, head.witness_WH, witnesses(base, vocab_sizes[0]), vocab_sizes[0])
    try:
        weight_H, bias, assistant_N = (head.tensors[name] for name in ("weight", "bias", _ASSISTANT))
    except KeyError as error:
        raise BadHead(f"ensemble head {folder} lacks {error}: train it again", "ensemble head") from None
    if weight_H.shape != head.witness_WH.shape[-1:] or bias.shape != (1,):  # the base model's width
        raise BadHead(
            f"ensemble head {folder}: its weight has another size than its base model's states: train it again",
            "ensemble head",
        )
    rows_WH = witnesses(assistant, vocab_sizes[1])
    if assistant_N.numel() != rows_WH.numel() or not same_rows(assistant_N.view_as(rows_WH), rows_WH):
        trained_for = found.settings.get("assistant", "another assistant")
        raise BadHead(
            f"ensemble head {folder} was trained for {trained_for!r:.80}, not {assistant}: train one for this pair",
            "ensemble head",
        )
    trained = float(found.settings["threshold"])
    return Deferral(weight_H.double(), float(bias), trained if threshold is None else threshold)
