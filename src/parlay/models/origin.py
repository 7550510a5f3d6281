"""What a model's files say of where it comes from: its name, its licence, and the hash of its weights."""

from __future__ import annotations

from pathlib import Path

from parlay.models import hub
from parlay.models.resolving import SUFFIX, resolve


def public_name(model: str) -> str:
    """The name of a model without folders of this machine: a Hub id or Parlay's own name stays as it is."""
    return Path(model).expanduser().resolve().name if Path(model).expanduser().exists() else hub.without_address(model)


def weights_sha256(model: str) -> str:
    """SHA-256 of the file that holds a model's weights; empty where there are several."""
    found = resolve(model)
    files = sorted(found.glob("*.safetensors")) if found.is_dir() else [found]
    parts = [path for path in files if "-of-" not in path.stem]
    return hub.hash_of(parts[0]) if len(parts) == len(files) == 1 else ""


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
