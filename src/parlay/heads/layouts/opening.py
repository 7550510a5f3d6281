"""Opens folders and repositories of the Hugging Face Hub that hold a head in one of the layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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
from parlay.models.fetch.hub import fetch_folder, without_address

LAYOUTS: tuple[Layout, ...] = (SPECULATORS, MEDUSA, MLP_SPECULATOR, HYDRA, DEEPSEEK_MTP, EAGLE3, EAGLE)
"""The first that recognises a folder reads it."""


def is_artefact(folder: Path) -> bool:
    """Whether a folder's config is that of a head of Parlay's own."""
    return {"method", "layer"} <= files.read_said(folder).keys()


def read(folder: Path, target: TargetShape) -> HeadArtefact:
    """The head of a folder, as one for this target. Raises BadHead, in one line."""
    config, found = files.read_said(folder), files.places(folder)
    layout = _layout_of(folder, config, frozenset(found))
    tensors = files.load(found, [name for name in found if layout.owns(config, name)])
    head = layout.read(Foreign(folder, config, tensors), target)
    head = replace(head, settings={**head.settings, LAYOUT: layout.name})
    sizes, asked = (head.layer.vocab_size, head.layer.hidden_size), (target.vocab_size, target.hidden_size)
    if sizes != asked:
        raise BadHead(
            f"{folder} was trained for a target of {sizes[0]} tokens and {sizes[1]} numbers, "
            f"not {asked[0]} and {asked[1]}: choose a head that was trained for this model"
        )
    if EMBEDDING in head.tensors and head.tensors[EMBEDDING].shape != asked:
        raise BadHead(f"{folder}: {EMBEDDING} is {list(head.tensors[EMBEDDING].shape)} instead of {list(asked)}")
    return head


def fetched(repo: str) -> Path:
    """The folder of a repository's head; of a whole model's files, those alone that hold it.

    Raises NotOnHub, BadHead.
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
