"""The card of a head, README.md: YAML front matter by the Hub's conventions, then text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parlay.heads.artefact import CARD, BadHead, Origin

TAG = "parlay-drafter"
"""By it the Hub finds drafters."""


def front_matter(method: str, origin: Origin, acceptance: Sequence[float], data: Mapping[str, Any]) -> str:
    """The lines between the two ``---``, with these.

    ``acceptance``: share of held-out drafts that are right up to each depth. ``data`` are further facts by name.
    """
    from huggingface_hub import ModelCardData  # here, because opening a head needs no network code

    facts = {
        "method": method,
        "domain": origin.domain,
        "target": origin.target,
        "target_sha256": origin.target_sha256,
        "acceptance": [round(share, 4) for share in acceptance],
        **data,
    }
    said = ModelCardData(
        license=origin.licence or "unknown",
        base_model=origin.target if "/" in origin.target else None,
        library_name="parlay",
        tags=["speculative-decoding", TAG, method],
        parlay={name: value for name, value in facts.items() if value != ""},
    )
    return f"---\n{said.to_yaml()}\n---\n"


def read_card(folder: Path) -> tuple[dict[str, Any], str]:
    """Front matter (empty where there is none) and text of a folder's card. Raises BadHead for YAML that is broken."""
    from huggingface_hub import ModelCard

    path = folder / CARD
    if not path.is_file():
        return {}, ""
    try:
        said = path.read_text(encoding="utf-8")
        if not said.startswith("---"):
            return {}, said.strip()
        card = ModelCard(said, ignore_metadata_errors=False)
    except (OSError, ValueError) as error:
        raise BadHead(f"the card {path} can't be read: {error}") from error
    return card.data.to_dict(), card.text.strip()
