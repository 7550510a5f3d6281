"""A trained head on disk: a folder of config.json, model.safetensors and README.md (its card). Never pickle.

The head's config says for which shape of target it was trained. Some rows of the target's embedding are kept as
witnesses: a target whose rows point elsewhere is another model. Quantisation turns them by a few degrees at most.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from parlay.models.config import DecoderConfig, RopeConfig
from parlay.models.user_cache import written_whole
from parlay.types import ParlayError

WITNESSES = 32
LEAST_COSINE = 0.95
_WITNESS = "target.witness"
_CONFIG, _WEIGHTS, _CARD = "config.json", "model.safetensors", "README.md"


class BadHead(ParlayError):
    """A head that is damaged, or was trained for another target."""


@dataclass(frozen=True, slots=True)
class HeadArtefact:
    """``method`` names the strategy, ``settings`` are the head's own sizes, ``layer`` the shape of its layers.

    ``witness_WH`` are rows of the target's embedding; see `witness_ids`.
    """

    method: str
    layer: DecoderConfig
    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    witness_WH: Tensor


def witness_ids(vocab_size: int) -> Tensor:
    """The ids of the witnesses, spread over the vocabulary; int64."""
    return torch.linspace(vocab_size // 16, vocab_size - 1, WITNESSES).long()


def save(folder: Path, head: HeadArtefact, card: str) -> None:
    """Writes the folder, bfloat16; what was there is replaced file by file, the weights last."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"method": head.method, "settings": dict(head.settings), "layer": _plain(head.layer)}
    tensors = {name: _stored(tensor) for name, tensor in head.tensors.items()}
    tensors[_WITNESS] = head.witness_WH.to(torch.bfloat16).contiguous()
    (folder / _CARD).write_text(card, encoding="utf-8")
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    with written_whole(folder / _WEIGHTS) as part:
        save_file(tensors, part)


def load(folder: Path) -> HeadArtefact:
    """Raises BadHead for files that are missing, damaged, or hold numbers that are not finite."""
    try:
        said = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / _WEIGHTS)
        layer = _layer(said["layer"])
        head = HeadArtefact(said["method"], layer, said["settings"], tensors, tensors.pop(_WITNESS))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise BadHead(f"{folder} holds no draft head that can be read: {error}") from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise BadHead(f"{folder}: {name} holds numbers that are not finite: the file is damaged")
    return head


def check_target(where: str, head: HeadArtefact, rows_WH: Tensor, vocab_size: int) -> None:
    """Raises BadHead unless the target's embedding has these witnesses: ``rows_WH`` are its rows of `witness_ids`."""
    if vocab_size != head.layer.vocab_size or rows_WH.shape != head.witness_WH.shape:
        raise BadHead(
            f"{where} was trained for a target of {head.layer.vocab_size} tokens and {head.layer.hidden_size} numbers, "
            f"not {vocab_size} and {rows_WH.shape[-1]}: choose a head that was trained for this model"
        )
    cosine = float(F.cosine_similarity(rows_WH.float(), head.witness_WH.float(), dim=-1).median())
    if not cosine >= LEAST_COSINE:
        raise BadHead(
            f"{where} was trained for another model of this shape (its embeddings agree to {cosine:.2f}, and "
            f"{LEAST_COSINE} is asked): choose a head that was trained for this one"
        )


def _stored(tensor: Tensor) -> Tensor:
    """``tensor`` of any shape as it is written: floating-point numbers in bfloat16, contiguous."""
    return (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()


def _plain(layer: DecoderConfig) -> dict[str, Any]:
    said = dataclasses.asdict(layer)
    del said["head"]
    return said


def _layer(said: Mapping[str, Any]) -> DecoderConfig:
    rope = said["rope"]
    lists = {"rope": RopeConfig(**{**rope, "divisors": tuple(rope["divisors"])}), "eos_ids": tuple(said["eos_ids"])}
    return DecoderConfig(**{**said, **lists})
