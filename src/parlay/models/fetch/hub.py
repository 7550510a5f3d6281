"""Models on the Hugging Face Hub, kept in its own cache folder; interrupted downloads are resumed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from parlay.types import ParlayError, first_line

T = TypeVar("T")

_ADDRESSES = ("hf.co/", "huggingface.co/", "https://hf.co/", "https://huggingface.co/")
_PART = re.compile(r"(.+)-\d{5}-of-\d{5}")
_TRANSPORTS = ("httpx", "httpx2", "requests")
"""HTTP packages of which one, depending on its version, the Hub's library uses; their errors surface without a
network."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


class NotOnHub(ParlayError):
    """Raised when the Hub can't give what was requested; the message says why in one line."""


def without_address(model: str) -> str:
    """``hf.co/user/repo`` as ``user/repo``."""
    start = next((start for start in _ADDRESSES if model.startswith(start)), "")
    return model[len(start) :]


def fetch_folder(repo: str, patterns: Sequence[str], without: Sequence[str] = ()) -> Path:
    """Download the files of ``repo`` that match ``patterns`` and none of ``without``; returns their folder. Raises
    NotOnHub if that fails."""
    import huggingface_hub  # here, as local folders need no network code

    wanted = {"allow_patterns": list(patterns), "ignore_patterns": list(without) or None}
    return Path(asked(repo, lambda: huggingface_hub.snapshot_download(repo, **wanted)))


def fetch_gguf(repo: str, quantization: str) -> Path:
    """Download the GGUF file of ``repo`` whose name ends in ``quantization``, as in ``Q4_K_M``; of a split file,
    returns the first part.

    The comparison ignores case. Raises NotOnHub if no file or more than one matches.
    """
    any_case = "".join(f"[{letter.lower()}{letter.upper()}]" if letter.isalpha() else letter for letter in quantization)
    ends = (f"{any_case}.gguf", f"{any_case}-?????-of-?????.gguf")
    folder = fetch_folder(repo, [*ends, *(f"*[-._/]{end}" for end in ends)])
    name = re.compile(rf"(.*[-._])?{re.escape(quantization)}(-\d{{5}}-of-\d{{5}})?\.gguf", re.IGNORECASE)
    found = sorted(path for path in folder.rglob("*.gguf") if name.fullmatch(path.name) and not _projector(path))
    models = {_whole(path) for path in found}
    if not found:
        names = gguf_names(repo)
        offer = f"; its GGUF files are {names}" if names else ""
        raise NotOnHub(f"{repo} on the Hugging Face Hub has no {quantization}{offer}")
    if len(models) > 1:
        listed = ", ".join(sorted(path.name for path in models))
        raise NotOnHub(
            f"{repo} has more than one {quantization}: {listed}; download the one you mean, and name the file"
        )
    return found[0]


def check_hashes(files: Sequence[Path]) -> None:
    """Compare large files with the Hub's hashes, which are their names in its cache.

    Raises NotOnHub for one that differs, and removes it.
    """
    for path in files:
        blob = path.resolve()
        if _SHA256.fullmatch(blob.name) and hash_of(blob) != blob.name:
            blob.unlink()
            raise NotOnHub(f"{path.name} is not what the Hugging Face Hub says it is, and was removed: pull it again")


def hash_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _projector(path: Path) -> bool:
    """Whether the file is the image or audio encoder that comes with a text model."""
    return path.name.lower().startswith("mmproj")


def _whole(path: Path) -> Path:
    """The common name of all parts of a split model."""
    match = _PART.fullmatch(path.stem)
    return path.with_name(match[1] + path.suffix) if match else path


def gguf_names(repo: str) -> str:
    """The names of the GGUF files in ``repo``, separated by commas; empty if there are none or the Hub can't be
    reached."""
    import huggingface_hub

    try:
        names = asked(repo, lambda: huggingface_hub.list_repo_files(repo))
    except NotOnHub:
        return ""
    return ", ".join(sorted({_whole(Path(name)).stem for name in names if name.endswith(".gguf")}))


def asked(repo: str, request: Callable[[], T]) -> T:
    """Send a request to the Hub, and return its result. Raises NotOnHub, in one line, if it fails."""
    import huggingface_hub

    try:
        return request()
    except Exception as error:
        known = isinstance(error, OSError | ValueError | huggingface_hub.errors.RevisionResolutionError)
        if not known and type(error).__module__.partition(".")[0] not in _TRANSPORTS:
            raise
        raise NotOnHub(f"can't get {repo!r} from the Hugging Face Hub ({first_line(error)})") from error
