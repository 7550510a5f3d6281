"""Writes a head's folder in the layout of another program: whole, or not at all."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from parlay.heads.artefact import CARD, CONFIG, WEIGHTS, BadHead, HeadArtefact
from parlay.heads.card import front_matter
from parlay.heads.layouts.writing import WRITERS, Verifier
from parlay.types import ParlayError


def export(head: HeadArtefact, card: str, layout: str, out: Path, verifier: Verifier) -> None:
    """Writes the folder ``out``. ``card`` is the text of the head's card, ``layout`` one of `WRITERS`.

    Raises BadHead for a head that the layout can't hold, ValueError for a folder that has files already, ParlayError
    for one that can't be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already: name a folder that is empty, or none")
    writer = WRITERS[layout].get(head.method)
    if writer is None:
        raise BadHead(f"--format {layout} is for {', '.join(WRITERS[layout])}, and this is a head for {head.method}")
    config, tensors = writer(head, verifier)
    text = card or front_matter(head.method, head.origin, (), {}) + f"\n# {head.method} for {head.origin.target}\n"
    try:
        _write(config, tensors, f"{text.rstrip()}\n\nThis folder is in the layout of {layout}.\n", out)
    except (OSError, SafetensorError) as error:
        raise ParlayError(f"can't write {out}: {error}") from error


def _write(config: Mapping[str, Any], tensors: Mapping[str, Tensor], card: str, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".exporting-", dir=out.parent) as started:
        part = Path(started) / out.name
        part.mkdir()
        save_file({name: each.contiguous() for name, each in tensors.items()}, part / WEIGHTS, {"format": "pt"})
        (part / WEIGHTS).chmod(0o644)
        (part / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (part / CARD).write_text(card, encoding="utf-8")
        part.replace(out)
