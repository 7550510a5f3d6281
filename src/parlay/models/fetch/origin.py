"""Where a model comes from, as its files say: its name, its licence, and the hash of its weights. Loads no torch."""

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
    """The name of a model without folders of this machine: a Hub id or Parlay's own name stays as it is."""
    return user_path(model).resolve().name if user_path(model).exists() else hub.without_address(model)


def weight_files(model: str) -> list[Path]:
    """The files that hold a model's weights: of a folder its safetensors, of a GGUF file in parts all of them."""
    found = resolve(model)
    pattern = "*.safetensors" if found.is_dir() else _PART.sub("-*-of-", found.name)
    return sorted((found if found.is_dir() else found.parent).glob(pattern))


def weights_sha256(model: str) -> str:
    """SHA-256 of the file that holds a model's weights; empty where there are several."""
    files = weight_files(model)
    parts = [path for path in files if "-of-" not in path.stem]
    return remembered_hash_of(parts[0]) if len(parts) == len(files) == 1 else ""


def weights_fingerprint(model: str, *others: str) -> str:
    """SHA-256 that stands for all of a model's weights: of their file, or of the hashes of its parts.

    ``others`` are models and files on which the texts depend, too.
    """
    hashes = [remembered_hash_of(path) for name in (model, *others) for path in weight_files(name)]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


@cache
def build_fingerprint() -> str:
    """The code whose arithmetic gives the logits here: Parlay's version and C sources, and its libraries' versions."""
    return " ".join([__version__, digest(), *(f"{name} {version(name)}" for name in ("torch", "transformers"))])


def licence(model: str) -> str:
    """The licence as a model's GGUF file or card names it; empty where it does not."""
    found = resolve(model)
    if found.suffix == SUFFIX:
        from parlay.models.gguf.file import read_parts  # here, because most callers have a folder

        return str(read_parts(found)[0].keys.get("general.license", ""))
    card = found / "README.md"
    if not card.is_file():
        return ""
    from huggingface_hub import metadata_load

    return str((metadata_load(card) or {}).get("license", ""))
