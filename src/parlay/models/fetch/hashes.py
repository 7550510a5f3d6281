"""SHA-256 of large files, kept in the user's cache until a file changes: hashing takes seconds per gigabyte."""

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
"""Most hashes kept; the oldest are dropped first."""
_SMALL = 1 << 20
"""Files up to this many bytes are hashed each time, which is as fast as a look-up."""


def remembered_hash_of(path: Path) -> str:
    """SHA-256 of a file in hexadecimal digits, computed when the file last changed. Raises OSError if the file can't be
    read.

    A file counts as unchanged if its size, inode, modification time and ctime (which users can't set) are the same.
    This is enough to notice replaced files; to verify a download use `hash_of`.
    """
    place = path.resolve()
    if place.stat().st_size <= _SMALL:
        return hash_of(place)
    try:
        file = user_cache() / _FILE
    except ParlayError:  # no home folder, so there is no cache
        return hash_of(place)
    stamp = _stamp(place)
    then, _, known = _read(file).get(str(place), "").rpartition(" ")
    if then == stamp:
        return known
    found = hash_of(place)
    if _stamp(place) == stamp:  # the file may be written just now
        _remember(file, str(place), f"{stamp} {found}")
    return found


def _stamp(place: Path) -> str:
    now = place.stat()
    return f"{now.st_size} {now.st_ino} {now.st_mtime_ns} {now.st_ctime_ns}"


def _remember(file: Path, place: str, line: str) -> None:
    with one_writer(file.parent), suppress(OSError):
        kept = {name: entries for name, entries in _read(file).items() if name != place}
        newest = [*kept.items(), (place, line)][-_MOST:]
        with written_whole(file, mode=0o600) as part:
            part.write_text(json.dumps(dict(newest), indent=1), encoding="utf-8")


def _read(file: Path) -> Mapping[str, str]:
    """Read the cache; empty if it is missing or damaged."""
    with suppress(OSError, ValueError, RecursionError):
        entries = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(entries, dict):
            return {name: line for name, line in entries.items() if isinstance(line, str)}
    return {}
