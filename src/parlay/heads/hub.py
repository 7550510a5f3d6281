"""Drafters on the Hugging Face Hub, and their cards; a repository has config, safetensors and card, but no code."""

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
    """A repository's description of its drafter, read before the weights; ``commit`` pins its files."""

    repo: str
    commit: str
    facts: HeadFacts
    card: dict[str, Any]

    @property
    def licence(self) -> str:
        """The licence in the config, else in the card; empty if neither has one."""
        licence = self.card.get("license")
        return self.facts.origin.licence or (str(licence) if licence else "")


def look(repo: str, revision: str | None = None) -> OfferedDrafter:
    """Download config and card of a repository's drafter; ``revision``: a branch, tag or commit.

    Raises NotOnHub if they can't be downloaded, BadHead if the repository has no drafter.
    """
    repo = without_address(repo)
    folder = _fetch(repo, revision, [CONFIG, CARD])
    return OfferedDrafter(repo, folder.name, read_facts(folder), read_card(folder)[0])


def pull(offer: OfferedDrafter, *, domain: str = "", name: str = "") -> StoredDrafter:
    """Download the weights of the commit that `look` found, check their hash, and add the drafter to the store."""
    folder = _fetch(offer.repo, offer.commit, [CONFIG, CARD, WEIGHTS])
    check_hashes([path for path in (folder / WEIGHTS,) if path.exists()])
    return store.add(folder, domain=domain, name=name, pulled=Pulled(offer.repo, offer.commit))


def push(folder: Path, repo: str, *, private: bool = False) -> str:
    """Upload a drafter's three files; returns the address. The Hub library's own login is used.

    A card without front matter gets one, so that the Hub finds the drafter by its tag. Raises NotOnHub if that fails.
    """
    import huggingface_hub  # here, as listing drafters needs no network code

    facts, (metadata, text) = read_facts(folder), read_card(folder)
    head = (
        ""
        if TAG in metadata.get("tags", ())
        else front_matter(facts.method, facts.origin, () if facts.expected is None else (facts.expected,), {}) + "\n"
    )
    card = (head + (text if head else (folder / CARD).read_text(encoding="utf-8"))).encode()
    files: list[tuple[str, str | bytes]] = [(CARD, card), *((file, str(folder / file)) for file in (CONFIG, WEIGHTS))]
    operations = [
        huggingface_hub.CommitOperationAdd(path_in_repo=file, path_or_fileobj=content) for file, content in files
    ]
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
"""The tag by which the Hub finds drafters."""


def front_matter(method: str, origin: Origin, acceptance: Sequence[float], data: Mapping[str, Any]) -> str:
    """The lines of front matter between the two ``---``.

    ``acceptance`` is the share of held-out drafts that are right up to each depth; ``data`` are further facts by name.
    """
    from huggingface_hub import ModelCardData  # here, as opening a head needs no network code

    facts = {
        "method": method,
        "domain": origin.domain,
        "target": origin.target,
        "target_sha256": origin.target_sha256,
        "acceptance": [round(share, 4) for share in acceptance],
        **data,
    }
    metadata = ModelCardData(
        license=origin.licence or "unknown",
        base_model=origin.target if "/" in origin.target else None,
        library_name="parlay",
        tags=["speculative-decoding", TAG, method],
        parlay={name: value for name, value in facts.items() if value != ""},
    )
    return f"---\n{metadata.to_yaml()}\n---\n"


def read_card(folder: Path) -> tuple[dict[str, Any], str]:
    """The front matter (empty if there is none) and the text of a folder's card. Raises BadHead for invalid YAML."""
    import yaml
    from huggingface_hub import ModelCard

    path = folder / CARD
    if not path.is_file():
        return {}, ""
    try:
        content = path.read_text(encoding="utf-8")
        if not content.startswith("---"):
            return {}, content.strip()
        card = ModelCard(content, ignore_metadata_errors=False)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        raise BadHead(f"the card {path} can't be read: {' '.join(str(error).split())}") from error
    return card.data.to_dict(), card.text.strip()
