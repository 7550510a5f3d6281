"""Files that keep stores from one process to the next: integers by tenant, checked on reading, replaced as a whole.

Layout, little-endian: `_HEADER` (magic, version, kind, vocabulary size, payload bytes, CRC-32 of the payload), then per
tenant the length of its salt and the number of its lists (two uint32), the salt in UTF-8, and each list as its length
(uint32) and its entries (int32).
"""

from __future__ import annotations

import logging
import os
import struct
import tempfile
import threading
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parlay.options import UsageError

logger = logging.getLogger(__name__)

Lists = dict[str, list["array[int]"]]
"""Lists of integers by tenant."""

STORE_WRITER = "parlay-store"
"""The name of threads that write files."""

_HEADER = struct.Struct("<8sH10sQQI")
_MAGIC = b"PARLAYST"
_VERSION = 1
_PAIR = struct.Struct("<II")
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class StoreFile:
    """A file with one ``kind`` of store for one vocabulary.

    If two drafters write to the same file, each overwrites the other's. ``strategy`` is named in errors about the file.
    """

    path: Path
    kind: str
    vocab_size: int
    strategy: str

    def load(self) -> Lists:
        """Read the file; empty if there is none. A damaged one is renamed, with a warning.

        Raises UsageError for a file that holds something else.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            if not self.path.parent.is_dir():
                raise self._refuse("its directory does not exist") from None
            return {}
        except OSError as error:
            raise self._refuse(f"it can't be read ({error.strerror})") from None
        try:
            lists = _decode(self._payload(data))
        except UsageError:
            raise
        except (struct.error, ValueError):  # UnicodeDecodeError is a ValueError
            return self._set_aside()
        for entries in (entries for tenant in lists.values() for entries in tenant if len(entries)):
            if min(entries) < 0 or max(entries) >= self.vocab_size:
                raise self._refuse(f"it has a token outside the vocabulary of {self.vocab_size}")
        return lists

    def save(self, lists: Mapping[str, Sequence[array[int]]]) -> None:
        """Replace the file atomically, so that a crash leaves the old or the new one. Raises OSError."""
        payload = _encode(lists)
        kind = self.kind.encode()
        header = _HEADER.pack(_MAGIC, _VERSION, kind, self.vocab_size, len(payload), zlib.crc32(payload))
        handle, temporary = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(header + payload)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except BaseException:
            os.unlink(temporary)
            raise

    def _payload(self, data: bytes) -> bytes:
        if len(data) < _HEADER.size or not data.startswith(_MAGIC):
            raise self._refuse("it is not a store; name another file")
        _, version, kind, vocab_size, length, checksum = _HEADER.unpack_from(data)
        payload = data[_HEADER.size :]
        if version != _VERSION:
            raise self._refuse(f"it has format {version}, this version reads {_VERSION}; delete it to start afresh")
        if kind.rstrip(b"\0") != self.kind.encode():
            raise self._refuse(f"it holds {kind.rstrip(bytes(1)).decode(errors='replace')}, not {self.kind}")
        if vocab_size != self.vocab_size:
            raise self._refuse(f"it is for a vocabulary of {vocab_size}, this target has {self.vocab_size}")
        if len(payload) != length or zlib.crc32(payload) != checksum:
            raise ValueError("damaged")
        return payload

    def _set_aside(self) -> Lists:
        """Start with an empty store, and keep the damaged file under another name."""
        aside = self.path.with_name(f"{self.path.name}.damaged")
        try:
            os.replace(self.path, aside)
        except OSError as error:
            raise self._refuse(f"it is damaged, and can't be renamed ({error.strerror})") from None
        logger.warning(
            "strategy %s: store=%s is damaged; it is now %s, and a new one begins", self.strategy, self.path, aside
        )
        return {}

    def _refuse(self, reason: str) -> UsageError:
        return UsageError(f"strategy {self.strategy}: store={self.path} can't be used: {reason}")


class Saving:
    """Decides when a file is written: after every ``every`` requests that changed its store, and by `save` at the end.

    ``lists`` returns the store's content, in lists that never change. The writing thread calls it while the store goes
    on changing. Without a file nothing is written.
    """

    def __init__(
        self, file: StoreFile | None, every: int, lists: Callable[[], Mapping[str, Sequence[array[int]]]]
    ) -> None:
        self._file = file
        self._every = every
        self._lists = lists
        self._unsaved = 0
        self._writer: threading.Thread | None = None

    def changed(self) -> None:
        """Count a request that has changed the store. If due, a thread writes the file, so no step waits for it."""
        self._unsaved += 1
        writes = self._writer is not None and self._writer.is_alive()
        if self._file is None or self._unsaved < self._every or writes:
            return
        self._unsaved = 0
        self._writer = threading.Thread(target=_save, args=(self._file, self._lists), name=STORE_WRITER)
        self._writer.start()

    def save(self) -> None:
        """Write unsaved changes, and return when the file has them."""
        if self._writer is not None:
            self._writer.join()
        if self._file is not None and self._unsaved:
            self._unsaved = 0
            _save(self._file, self._lists)


def _save(file: StoreFile, lists: Callable[[], Mapping[str, Sequence[array[int]]]]) -> None:
    """Write the file. If that fails, log a warning; it is not tried again at once."""
    try:
        file.save(lists())
    except OSError as error:
        logger.warning("the store %s could not be written: %s", file.path, error)


def _encode(lists: Mapping[str, Sequence[array[int]]]) -> bytes:
    parts: list[bytes] = []
    for salt, entries in lists.items():
        name = salt.encode()
        parts += [_PAIR.pack(len(name), len(entries)), name]
        for one in entries:
            parts += [_LENGTH.pack(len(one)), np.asarray(one, dtype="<i4").tobytes()]
    return b"".join(parts)


def _decode(payload: bytes) -> Lists:
    lists: Lists = {}
    place = 0
    while place < len(payload):
        name_length, count = _PAIR.unpack_from(payload, place)
        place += _PAIR.size
        salt = payload[place : place + name_length].decode()
        place += name_length
        lists[salt] = []
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(payload, place)
            place += _LENGTH.size
            entries = np.frombuffer(payload, dtype="<i4", count=length, offset=place)
            place += entries.nbytes
            lists[salt].append(array("i", entries.astype(np.intc).tobytes()))
    return lists
