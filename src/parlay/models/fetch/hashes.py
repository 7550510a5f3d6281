"""SHA-256 of large files, remembered in the user's cache until a file changes: they take seconds a gigabyte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from parlay.models.fetch.hub import hash_of
from parlay.system.user_cache import one_writer, user_cache, written_whole
from parlay.types import ParlayError

_FILE = "hashes.json"
_MOST = 512
"""Files of which hashes are remembered; the ones that were hashed first are forgotten first."""
_SMALL = 1 << 20
"""Bytes up to which a file is hashed each time: that is as quick as looking it up."""


def remembered_hash_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits, as it was when the file last changed. Raises OSError.

    A file that is as large and was last changed (ctime, which nobody sets) in the same nanosecond counts as the same.
    So this tells files apart that people exchange; to check a file that was fetched, use `hash_of`.
    """
    place = path.resolve()
    if place.stat().st_size <= _SMALL:
        return hash_of(place)
    try:
        file = user_cache() / _FILE
    except ParlayError:  # no home folder, so nothing can be remembered
        return hash_of(place)
    stamp = _stamp(place)
    then, _, known = _read(file).get(str(place), "").rpartition(" ")
    if then == stamp:
        return known
    found = hash_of(place)
    if _stamp(place) == stamp:  # it may be written just now
        _remember(file, str(place), f"{stamp} {found}")
    return found


def _stamp(place: Path) -> str:
    now = place.stat()
    return f"{now.st_size} {now.st_ino} {now.st_mtime_ns} {now.st_ctime_ns}"


def _remember(file: Path, place: str, line: str) -> None:
    with one_writer(file.parent), suppress(OSError):
        kept = {name: said for name, said in _read(file).items() if name != place}
        newest = [*kept.items(), (place, line)][-_MOST:]
        with written_whole(file, mode=0o600) as part:
            part.write_text(json.dumps(dict(newest), indent=1), encoding="utf-8")


def _read(file: Path) -> Mapping[str, str]:
    """Read what is remembered; nothing where the file is of no use."""
    with suppress(OSError, ValueError, RecursionError):
        said = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(said, dict):
            return {name: line for name, line in said.items() if isinstance(line, str)}
    return {}
