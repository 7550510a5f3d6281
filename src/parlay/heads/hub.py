"""Drafters on the Hugging Face Hub, and their cards. A repository holds config, safetensors and card, and no code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parlay.heads import store
from parlay.heads.artefact import CARD, CONFIG, WEIGHTS, BadHead, HeadFacts, Origin, read_facts
from parlay.heads.store import Pulled, StoredDrafter
from parlay.models.fetch.hub import asked, check_hashes, without_address


@dataclass(frozen=True, slots=True)
class OfferedDrafter:
    """A repository's description of its drafter, read before its weights. ``commit`` names its files for good."""

    repo: str
    commit: str
    facts: HeadFacts
    card: dict[str, Any]

    @property
    def licence(self) -> str:
        """Licence by the config, else by the card; empty where neither names one."""
        said = self.card.get("license")
        return self.facts.origin.licence or (str(said) if said else "")


def look(repo: str, revision: str | None = None) -> OfferedDrafter:
    """Fetches config and card. Raises NotOnHub for what can't be had, BadHead for a repository without a drafter."""
    repo = without_address(repo)
    folder = _fetch(repo, revision, [CONFIG, CARD])
    return OfferedDrafter(repo, folder.name, read_facts(folder), read_card(folder)[0])


def pull(offer: OfferedDrafter, *, domain: str = "", name: str = "") -> StoredDrafter:
    """Fetches the weights at the commit that was looked at, compares hashes, and adds the drafter to the store."""
    folder = _fetch(offer.repo, offer.commit, [CONFIG, CARD, WEIGHTS])
    check_hashes([path for path in (folder / WEIGHTS,) if path.exists()])
    return store.add(folder, domain=domain, name=name, pulled=Pulled(offer.repo, offer.commit))


def push(folder: Path, repo: str, *, private: bool = False) -> str:
    """Uploads a drafter's three files; returns the address. The login is the Hub library's own.

    A card without front matter gets one, so that the Hub finds the drafter by its tag. Raises NotOnHub.
    """
    import huggingface_hub  # here, because listing drafters needs no network code

    facts, (said, text) = read_facts(folder), read_card(folder)
    head = (
        ""
        if TAG in said.get("tags", ())
        else front_matter(facts.method, facts.origin, () if facts.expected is None else (facts.expected,), {}) + "\n"
    )
    card = (head + (text if head else (folder / CARD).read_text(encoding="utf-8"))).encode()
    files: list[tuple[str, str | bytes]] = [(CARD, card), *((file, str(folder / file)) for file in (CONFIG, WEIGHTS))]
    operations = [huggingface_hub.CommitOperationAdd(path_in_repo=file, path_or_fileobj=held) for file, held in files]
    api = huggingface_hub.HfApi()

    def send() -> str:
        made = api.create_repo(repo, private=private, exist_ok=True)
        api.create_commit(made.repo_id, operations, commit_message=f"Drafter for {facts.origin.target}")
        return str(made)

    return asked(repo, send)


def _fetch(repo: str, revision: str | None, files: list[str]) -> Path:
    import huggingface_hub

    fetched = asked(repo, lambda: huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=files))
    return Path(fetched)


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
    import yaml
    from huggingface_hub import ModelCard

    path = folder / CARD
    if not path.is_file():
        return {}, ""
    try:
        said = path.read_text(encoding="utf-8")
        if not said.startswith("---"):
            return {}, said.strip()
        card = ModelCard(said, ignore_metadata_errors=False)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise BadHead(f"the card {path} can't be read: {' '.join(str(error).split())}") from error
    return card.data.to_dict(), card.text.strip()
