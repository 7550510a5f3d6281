"""The drafters on this machine: those in the package, and those in a store in the user's cache folder.

A drafter's default name consists of target, method and domain (the kind of text it was trained on).
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from parlay.heads.artefact import CARD, CONFIG, FORMAT, GENERAL, WEIGHTS, BadHead, HeadFacts, load, read_facts
from parlay.models.fetch.hub import hash_of
from parlay.options import UsageError, nearest, user_path
from parlay.system.user_cache import user_cache

SHIPPED = Path(__file__).parents[1] / "models" / "checkpoints" / "heads"
"""The package's drafters: a folder per method, with a folder per target."""

_DOMAIN = re.compile(r"[a-z0-9][a-z0-9.-]*")
_UNFIT = re.compile(r"[^a-z0-9.]+")
_PULLED = "pulled.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pulled:
    """The Hugging Face Hub repository of a drafter; ``commit`` pins its files."""

    repo: str
    commit: str


@dataclass(frozen=True, slots=True)
class StoredDrafter:
    """A drafter on this machine, with its name; ``shipped``: it is part of the package."""

    name: str
    folder: Path
    facts: HeadFacts
    shipped: bool = False
    pulled: Pulled | None = None

    @property
    def size(self) -> int:
        """Size of its weights in bytes."""
        return (self.folder / WEIGHTS).stat().st_size


def place() -> Path:
    """Return the store's folder, which need not exist."""
    return user_cache() / "drafters"


def drafters() -> list[StoredDrafter]:
    """Return all readable drafters, the store's first."""
    return [*_stored(), *_shipped()]


def find(name: str) -> StoredDrafter:
    """Return the drafter of this name. Raises ValueError if there is none."""
    known = {each.name: each for each in reversed(drafters())}
    if name not in known:
        raise ValueError(f"no drafter {name} on this machine: {nearest(name, known)}")
    return known[name]


def candidates(method: str, name: str = "") -> list[StoredDrafter]:
    """Return a method's drafters with this name or domain, the best match first; without a name the general ones."""
    own = [each for each in drafters() if each.facts.method == method]
    named = [each for each in own if name and each.name == name]
    return [*named, *(each for each in own if each.facts.origin.domain == (name or GENERAL) and each not in named)]


def folder_of(method: str, name: str) -> Path:
    """Return the folder ``name``, or the folder of the method's drafter with this name or domain.

    Raises UsageError if there is neither.
    """
    folder = user_path(name)
    if (folder / CONFIG).is_file():
        return folder
    found = candidates(method, name)
    if not found:
        known = [each.name for each in drafters() if each.facts.method == method]
        raise UsageError(f"{name}: no folder of a head, and no drafter for {method}: {nearest(name, known)}")
    return found[0].folder


def usual_name(facts: HeadFacts) -> str:
    """Return a drafter's default name."""
    target = facts.origin.target.rpartition("/")[2] or "unknown"
    return "-".join(_UNFIT.sub("-", part.lower()).strip("-.") for part in (target, facts.method, facts.origin.domain))


def add(folder: Path, *, domain: str = "", name: str = "", pulled: Pulled | None = None) -> StoredDrafter:
    """Copy a folder's drafter into the store atomically, with the hash of its weights.

    Raises BadHead for an unusable drafter, ValueError for an invalid domain or name.
    """
    load(folder)
    facts = read_facts(folder)
    if domain:
        facts = replace(facts, origin=replace(facts.origin, domain=_word(domain, "domain")))
    name = _word(name, "name") if name else usual_name(facts)
    if any(each.name == name for each in drafters() if not each.shipped):
        raise ValueError(f"there is a drafter {name} already: remove it first, or give this one another --name")
    place().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".adding-", dir=place()) as started:
        part = Path(started) / name
        _copy(folder, part, facts, pulled)
        part.rename(place() / name)
    return find(name)


def remove(name: str) -> Path:
    """Delete a drafter from the store; return its folder. Raises ValueError if it is not in the store."""
    if _DOMAIN.fullmatch(name) and (folder := place() / name).is_dir():  # damaged ones, too
        shutil.rmtree(folder)
        return folder
    find(name)  # raises unless it is shipped
    raise ValueError(f"{name} is part of Parlay: only drafters that were added or pulled can be removed")


def _stored() -> Iterator[StoredDrafter]:
    for path in sorted(place().glob(f"[!.]*/{CONFIG}")):
        try:
            yield StoredDrafter(path.parent.name, path.parent, read_facts(path.parent), pulled=_pulled(path.parent))
        except BadHead as error:
            _log.warning("%s: remove it with parlay drafters remove %s", error, path.parent.name)


def _shipped() -> Iterator[StoredDrafter]:
    for path in sorted(SHIPPED.glob(f"*/*/{CONFIG}")):
        facts = read_facts(path.parent)
        yield StoredDrafter(usual_name(facts), path.parent, facts, shipped=True)


def _copy(folder: Path, part: Path, facts: HeadFacts, pulled: Pulled | None) -> None:
    part.mkdir()
    for file in (WEIGHTS, CARD):
        if (folder / file).is_file():
            shutil.copy(folder / file, part / file)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config |= {"format": FORMAT, "origin": asdict(facts.origin), "sha256": hash_of(part / WEIGHTS)}
    (part / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if pulled is not None:
        (part / _PULLED).write_text(json.dumps(asdict(pulled)) + "\n", encoding="utf-8")


def _pulled(folder: Path) -> Pulled | None:
    path = folder / _PULLED
    try:
        return Pulled(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None
    except (OSError, ValueError, TypeError) as error:
        raise BadHead(f"{path} can't be read: {error}") from error


def _word(text: str, what: str) -> str:
    if not _DOMAIN.fullmatch(text):
        raise ValueError(f"{what} {text!r}: take small letters, digits, points and hyphens, as in code")
    return text
