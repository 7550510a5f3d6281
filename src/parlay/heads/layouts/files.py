"""Reads folders in foreign layouts: config and safetensors, never pickles."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parlay.heads.artefact import CARD, CONFIG, BadHead, HeadArtefact
from parlay.heads.layouts import files
from parlay.heads.layouts.deepseek_mtp import DEEPSEEK_MTP
from parlay.heads.layouts.eagle import EAGLE
from parlay.heads.layouts.eagle3 import EAGLE3
from parlay.heads.layouts.hydra import HYDRA
from parlay.heads.layouts.layout import EMBEDDING, LAYOUT, Foreign, Json, Layout, TargetShape
from parlay.heads.layouts.medusa import MEDUSA
from parlay.heads.layouts.mlp_speculator import MLP_SPECULATOR
from parlay.heads.layouts.speculators import SPECULATORS
from parlay.models.config import read_json
from parlay.models.fetch.hub import fetch_folder, without_address
from parlay.types import ParlayError

INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def read_said(folder: Path) -> Json:
    """Read the folder's config. Raises BadHead if it can't be read."""
    try:
        return read_json(folder / CONFIG)
    except ParlayError as error:
        raise BadHead(f"{folder} holds no draft head that can be read: {error}") from error


def places(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor. Raises BadHead for a folder without safetensors, or with unreadable ones."""
    if (folder / INDEX).is_file():
        return {name: folder / file for name, file in index_of(folder).items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadHead(_pickled(folder))
    try:
        found: dict[str, Path] = {}
        for path in files:
            with safe_open(path, "pt") as file:
                found |= dict.fromkeys(file.keys(), path)
        return found
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error


def index_of(folder: Path) -> dict[str, str]:
    """Return the file of each tensor from the folder's index. Raises BadHead for an invalid index."""
    try:
        found = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        if all(Path(file).name == file for file in found.values()):
            return dict(found)
        raise ValueError("it names files of other folders")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadHead(f"{folder / INDEX} can't be read: {error}") from error


def load(found: Mapping[str, Path], names: Iterable[str]) -> dict[str, Tensor]:
    """Load these tensors, float16 ones as float32. Raises BadHead for damaged files, and infinite or NaN numbers."""
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(found[name], []).append(name)
    tensors: dict[str, Tensor] = {}
    for path, wanted in by_file.items():
        try:
            with safe_open(path, "pt") as file:
                tensors |= {name: _usable(path, name, file.get_tensor(name)) for name in wanted}
        except (OSError, SafetensorError) as error:
            raise _damaged(path, error) from error
    return tensors


def _usable(path: Path, name: str, tensor: Tensor) -> Tensor:
    """Return ``tensor``, of any shape, if its numbers can be used."""
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool):
        raise BadHead(f"{path}: {name} has numbers of type {tensor.dtype}: give a head that is not quantized")
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise BadHead(f"{path}: {name} holds numbers that are not finite: the file is damaged")
    return tensor.float() if tensor.dtype == torch.float16 else tensor.clone()  # not mapped


def _damaged(path: Path, error: Exception) -> BadHead:
    return BadHead(f"{path} is damaged or cut short ({error}): download or copy it again")


def _pickled(folder: Path) -> str:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    name = pickles[0] if pickles else "FILE.bin"
    found = f"{folder} holds its weights as a pickle ({name})" if pickles else f"{folder} holds no *.safetensors"
    return (
        f'{found}, and pickles are never opened here. Convert one that you trust: python -c "import torch, '
        f"safetensors.torch as s; s.save_file({{k: v.clone() for k, v in torch.load('{name}', weights_only=True)"
        ".items()}, 'model.safetensors')\""
    )


LAYOUTS: tuple[Layout, ...] = (SPECULATORS, MEDUSA, MLP_SPECULATOR, HYDRA, DEEPSEEK_MTP, EAGLE3, EAGLE)
"""The first layout that recognises a folder reads it."""


def is_artefact(folder: Path) -> bool:
    """Whether a folder holds a head in Parlay's own format."""
    return {"method", "layer"} <= files.read_said(folder).keys()


def read(folder: Path, target: TargetShape) -> HeadArtefact:
    """Read a folder's head for this target. Raises BadHead, in one line, if that fails."""
    config, found = files.read_said(folder), files.places(folder)
    layout = _layout_of(folder, config, frozenset(found))
    tensors = files.load(found, [name for name in found if layout.owns(config, name)])
    try:
        head = layout.read(Foreign(folder, config, tensors), target)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise BadHead(f"{folder}: its parts are no head in the layout of {layout.name}: {reason:.100}") from None
    head = replace(head, settings={**head.settings, LAYOUT: layout.name})
    asked = (target.vocab_size, target.hidden_size)
    if EMBEDDING in head.tensors and head.tensors[EMBEDDING].shape != asked:
        raise BadHead(f"{folder}: {EMBEDDING} is {list(head.tensors[EMBEDDING].shape)} instead of {list(asked)}")
    return head


def fetched(repo: str) -> Path:
    """Download a repository's head, and return its folder; from a whole model's repository only the files with the
    head.

    Raises NotOnHub and BadHead.
    """
    repo = without_address(repo)
    folder = fetch_folder(repo, [CONFIG, CARD, files.INDEX])
    if not (folder / files.INDEX).is_file():
        return fetch_folder(repo, ["*.safetensors"])
    found, config = files.index_of(folder), files.read_said(folder)
    layout = _layout_of(folder, config, frozenset(found))
    return fetch_folder(repo, sorted({file for name, file in found.items() if layout.owns(config, name)}))


def _layout_of(folder: Path, config: Json, names: frozenset[str]) -> Layout:
    layout = next((each for each in LAYOUTS if each.recognises(config, names)), None)
    if layout is None:
        known = ", ".join(each.name for each in LAYOUTS)
        raise BadHead(f"{folder} holds no draft head that can be read: it is neither Parlay's own nor one of {known}")
    return layout
