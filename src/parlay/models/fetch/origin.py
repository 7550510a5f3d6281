"""Where a model comes from, according to its files: its name, its licence, and the hash of its weights. It does not
import torch."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.metadata import version
from pathlib import Path

from parlay import __version__
from parlay.compiled.build import digest
from parlay.models.fetch import hub
from parlay.models.fetch.hashes import remembered_hash_of
from parlay.models.fetch.resolving import resolve
from parlay.models.gguf import SUFFIX
from parlay.options import user_path

_PART = re.compile(r"-\d{5}-of-")


def public_name(model: str) -> str:
    """A model's name without local folders; a Hub id or Parlay's own name stays as it is."""
    return user_path(model).resolve().name if user_path(model).exists() else hub.without_address(model)


def weight_files(model: str) -> list[Path]:
    """The files with a model's weights: a folder's safetensors, or all parts of a GGUF file."""
    found = resolve(model)
    pattern = "*.safetensors" if found.is_dir() else _PART.sub("-*-of-", found.name)
    return sorted((found if found.is_dir() else found.parent).glob(pattern))


def weights_sha256(model: str) -> str:
    """SHA-256 of the file with a model's weights; empty if there are several."""
    files = weight_files(model)
    parts = [path for path in files if "-of-" not in path.stem]
    return remembered_hash_of(parts[0]) if len(parts) == len(files) == 1 else ""


def weights_fingerprint(model: str, *others: str) -> str:
    """SHA-256 of all of a model's weights: of the file, or of the hashes of its parts.

    ``others`` are more models and files on which the texts depend.
    """
    hashes = [remembered_hash_of(path) for name in (model, *others) for path in weight_files(name)]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


@cache
def build_fingerprint() -> str:
    """The versions of the code that computes the logits: Parlay's version and C sources, and those of its libraries."""
    return " ".join([__version__, digest(), *(f"{name} {version(name)}" for name in ("torch", "transformers"))])


def licence(model: str) -> str:
    """The licence that a model's GGUF file or model card names; empty if none does."""
    found = resolve(model)
    if found.suffix == SUFFIX:
        from parlay.models.gguf.file import read_parts  # here, as most callers have a folder

        return str(read_parts(found)[0].keys.get("general.license", ""))
    card = found / "README.md"
    if not card.is_file():
        return ""
    from huggingface_hub import metadata_load

    return str((metadata_load(card) or {}).get("license", ""))
