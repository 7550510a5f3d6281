"""Lists the models on this machine: built in, pulled, or in the Hugging Face Hub's cache."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.models.fetch import pulled
from parlay.models.fetch.pulled import WHEELS
from parlay.models.fetch.resolving import BUILT_IN, resolve_config
from parlay.options import nearest

if TYPE_CHECKING:
    from huggingface_hub import CachedRevisionInfo, HFCacheInfo


@dataclass(frozen=True, slots=True)
class KeptModel:
    """``source`` is built-in, pulled or hub; ``size`` is in bytes. ``files`` is the folder or GGUF file that can be
    opened."""

    name: str
    source: str
    size: int
    place: Path
    files: Path


def kept() -> list[KeptModel]:
    """List all models on this machine, built-in ones first."""
    own = [KeptModel(name, "built-in", _size(folder := resolve_config(name)), folder, folder) for name in BUILT_IN]
    places = [(name, pulled.place_of(name)) for name in WHEELS]
    brought = [
        KeptModel(name, "pulled", place.stat().st_size, place, place) for name, place in places if place.is_file()
    ]
    return [*own, *brought, *_from_hub()]


def remove(name: str) -> KeptModel:
    """Delete a model's files; returns the model. Raises ValueError for a model that is not there or came with the
    package."""
    found = {model.name: model for model in kept()}
    if name not in found:
        pulled = [each.name for each in found.values() if each.source != "built-in"]
        others = nearest(name, pulled) if pulled else "no model was pulled to it"
        raise ValueError(f"{name} is not on this machine: {others}")
    model = found[name]
    if model.source == "built-in":
        raise ValueError(f"{name} is part of Parlay: only models that were pulled can be removed")
    if model.source == "hub":
        _remove_from_hub(model.place)
    else:
        shutil.rmtree(model.place.parent)
    return model


def _from_hub() -> list[KeptModel]:
    """Repositories in the Hub's cache that hold a model."""
    cache = _hub_cache()
    repositories = [each for each in cache.repos if each.repo_type == "model"] if cache else []
    return sorted(
        (
            KeptModel(each.repo_id, "hub", each.size_on_disk, each.repo_path, _newest(each.revisions))
            for each in repositories
            if any(file.file_name.endswith((".safetensors", ".gguf")) for kept in each.revisions for file in kept.files)
        ),
        key=lambda model: model.name,
    )


def _newest(revisions: Iterable[CachedRevisionInfo]) -> Path:
    """The newest revision's folder, or its first GGUF file; a local path, so that nobody asks the Hub."""
    folder: Path = max(revisions, key=lambda each: each.last_modified).snapshot_path
    stored = [] if (folder / "config.json").is_file() else sorted(folder.rglob("*.gguf"))
    return stored[0] if stored else folder


def _remove_from_hub(place: Path) -> None:
    """Delete every revision of the repository."""
    cache = _hub_cache()
    assert cache is not None, "the repository was found there"
    revisions = [each.commit_hash for repo in cache.repos if repo.repo_path == place for each in repo.revisions]
    cache.delete_revisions(*revisions).execute()


def _hub_cache() -> HFCacheInfo | None:
    from huggingface_hub import constants, scan_cache_dir  # here, as only this needs the Hub's library

    return scan_cache_dir(constants.HF_HUB_CACHE) if Path(constants.HF_HUB_CACHE).is_dir() else None


def _size(place: Path) -> int:
    files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)
