"""Saves reusable prefixes to a file, so that a later process starts with them in its KV cache.

Layout, little-endian: `_HEAD` (magic, version, CRC-32 of the table, bytes of the description, numbers of pages and of
slabs), the table, and slabs, each at a multiple of `_APART`. The table is the description in JSON; for each page, as
int32, the number of the page before it or -1, the number of its salt, and its `BLOCK` tokens, with -1 after the last;
and for each slab its CRC-32. Page n is page n % pages of slab n // pages. Slabs have the shape of the store's own, so
pages are used where the file is mapped: nothing is copied.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from parlay.cache.pages import BLOCK, Page
from parlay.cache.prefixes import KnownPage
from parlay.cache.store import Store
from parlay.types import ParlayError

Key = Mapping[str, str]
"""Everything except the tokens that rows depend on, each item under the name that errors use."""
Texts = list[tuple[int, str, tuple[int, ...]]]
"""For each page the number of the page before it or -1, the salt, and the tokens."""

_HEAD = struct.Struct("<8sIIIII")
_MAGIC, _VERSION = b"PARLAYKV", 1
_APART = 1 << 16  # mappings may begin at its multiples on every system
_MOST_DESCRIPTION = 64 << 20
_NUMBERS = 2 + BLOCK  # numbers for each page in the table


class BadPrefixFile(ParlayError):
    """The prefixes of a file can't be used; the message says why."""


def check_own(path: Path) -> None:
    """Raise BadPrefixFile for an existing file that holds something else and must not be overwritten."""
    if path.exists():
        with path.open("rb") as file:
            if not _MAGIC.startswith(file.read(len(_MAGIC))):
                raise BadPrefixFile(f"{path} holds something else than prefixes: name another file")


class SavedPrefixes(NamedTuple):
    """The number of tokens in a file, and its size in bytes."""

    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Places:
    """The places of ``count`` slabs of ``size`` bytes in a file, after a table of ``table`` bytes."""

    table: int
    size: int
    count: int

    def each(self) -> range:
        return range(_whole(_HEAD.size + self.table), self.end, _whole(self.size))

    @property
    def end(self) -> int:
        return _whole(_HEAD.size + self.table) + self.count * _whole(self.size)


def write_prefixes(store: Store, file: BinaryIO, key: Key, most_bytes: int) -> SavedPrefixes:
    """Write the store's prefixes to a new file: at most ``most_bytes``, the most recently used prefixes first.

    Raises OSError.
    """
    pages, known = store.pool.slab_size[3], _reusable(store)
    while True:
        parts = [known[first : first + pages] for first in range(0, len(known), pages)]
        description, numbers = _described(store, key, known)
        places = _Places(len(description) + numbers.nbytes + 4 * len(parts), _slab_bytes(store), len(parts))
        if places.end <= most_bytes or not parts:
            break
        fit = max(0, most_bytes // _whole(places.size))
        known = known[: min(fit, len(parts) - 1) * pages]
    checks: list[int] = []
    for place, part in zip(places.each(), parts, strict=True):
        rows = _rows(store, part)
        checks.append(zlib.crc32(rows))
        file.seek(place)
        file.write(rows)
    file.truncate(places.end)
    table = description + numbers.tobytes() + np.array(checks, "<u4").tobytes()
    head = _HEAD.pack(_MAGIC, _VERSION, zlib.crc32(table), len(description), len(known), len(parts))
    file.seek(0)
    file.write(head + table)
    return SavedPrefixes(sum(len(page.tokens) for page in known), places.end)


def least_bytes(store: Store) -> int:
    """Return the size of the smallest file with any prefix."""
    return _whole(_slab_bytes(store)) + _APART


def read_prefixes(store: Store, file: BinaryIO, key: Key) -> int:
    """Load the file's prefixes into an empty store, as far as there is room; returns how many tokens.

    Raises BadPrefixFile for a file of another model or build, or one that is cut short or damaged; OSError.
    """
    try:
        texts, checks, places = _table(file, store, key)
        texts = texts[: store.free_tokens() // BLOCK]
        slabs = list(_slabs(file, store, checks[: -(-len(texts) // store.pool.slab_size[3])], places))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, struct.error):
        raise BadPrefixFile("it is damaged") from None
    _restore(store, texts, slabs)
    return sum(len(tokens) for _, _, tokens in texts)


def _whole(size: int) -> int:
    """Round the size up to a multiple of `_APART`."""
    return size + -size % _APART


def _slab_bytes(store: Store) -> int:
    return store.pool.slab_size[3] * store.shape.page_bytes


def _reusable(store: Store) -> list[KnownPage]:
    """Return the pages in the index, the most recently used first, and each after its predecessor."""
    known = {each.page: each for each in store.index.pages()}
    used = [page for page in known if page not in store.spare_pages]
    return [known[page] for page in (*used, *reversed([*store.spare_pages]))]


def _restore(store: Store, texts: Texts, slabs: Sequence[Tensor]) -> None:
    """Add pages that `_reusable` listed in another store to the index. The store must be empty and have room."""
    count, pages = store.pool.slab_size[3], list[Page]()
    for number, memory in enumerate(slabs):
        pages += store.pool.adopt(memory, min(count, len(texts) - number * count))
    for page, (before, salt, tokens) in zip(pages, texts, strict=True):
        store.index.put(KnownPage(page, pages[before] if before >= 0 else None, salt, tokens))
    for page in reversed(pages):
        store.spare_pages.add(page)


def _described(store: Store, key: Key, known: Sequence[KnownPage]) -> tuple[bytes, np.ndarray[Any, np.dtype[np.int32]]]:
    """Return the description, and the numbers of pages."""
    salts = list(dict.fromkeys(page.salt for page in known))
    places = {page.page: number for number, page in enumerate(known)}
    salt_places = {salt: number for number, salt in enumerate(salts)}
    numbers = np.full((len(known), _NUMBERS), -1, "<i4")
    for row, page in zip(numbers, known, strict=True):
        row[0] = places[page.before] if page.before is not None else -1
        row[1] = salt_places[page.salt]
        row[2 : 2 + len(page.tokens)] = page.tokens
    return json.dumps({"key": dict(key), "shape": _shape(store), "salts": salts}).encode(), numbers


def _shape(store: Store) -> str:
    """Describe the layout of rows."""
    return f"{[*store.pool.slab_size]} {store.shape.dtype} {store.shape.lanes}"


def _rows(store: Store, known: Sequence[KnownPage]) -> memoryview:
    """Return the rows of pages in the layout of a slab, zeros where it has no page."""
    slab = torch.zeros(store.pool.slab_size, dtype=store.shape.dtype)
    for number, page in enumerate(known):
        slab.select(3, number).copy_(page.page.rows)
    return slab.view(-1).view(torch.uint8).numpy().data


def _table(file: BinaryIO, store: Store, key: Key) -> tuple[Texts, list[int], _Places]:
    """Read and check the table of pages and slabs."""
    size = os.fstat(file.fileno()).st_size
    head = file.read(_HEAD.size)
    if not _MAGIC.startswith(head[: len(_MAGIC)]):
        raise BadPrefixFile("it holds no prefixes: name another file, which will be made")
    _, version, check, described, pages, slabs = _HEAD.unpack(head)
    if version != _VERSION:
        raise BadPrefixFile(f"it has format {version}, and this version reads {_VERSION}")
    places = _Places(described + 4 * (pages * _NUMBERS + slabs), _slab_bytes(store), slabs)
    if described > _MOST_DESCRIPTION or _HEAD.size + places.table > size:
        raise BadPrefixFile("it was cut short")
    table = file.read(places.table)
    if zlib.crc32(table) != check:
        raise BadPrefixFile("it is damaged")
    description = json.loads(table[:described])
    _check_key(description, store, key)
    if size != places.end or slabs != -(-pages // store.pool.slab_size[3]):
        raise BadPrefixFile("it was cut short, or something was added to it")
    numbers = np.frombuffer(table, "<i4", pages * _NUMBERS, described).reshape(-1, _NUMBERS)
    checks: list[int] = np.frombuffer(table, "<u4", slabs, places.table - 4 * slabs).tolist()
    return _texts(numbers.tolist(), description["salts"]), checks, places


def _check_key(description: Mapping[str, Any], store: Store, key: Key) -> None:
    """Raise BadPrefixFile if the rows were computed under another key."""
    stored = description["key"]
    if other := next((name for name in key if stored.get(name) != key[name]), None):
        raise BadPrefixFile(f"it was written with another {other}")
    if stored.keys() != key.keys() or description["shape"] != _shape(store):
        raise BadPrefixFile("it was written with another layout of the cache")


def _texts(numbers: Sequence[Sequence[int]], salts: Sequence[str]) -> Texts:
    """Read the pages from the table. Raises ValueError if they are not valid texts."""
    texts: Texts = []
    seen: set[tuple[int, int, tuple[int, ...]]] = set()
    for place, (before, salt, *ids) in enumerate(numbers):
        count = ids.index(-1) if -1 in ids else BLOCK
        tokens = tuple(ids[:count])
        follows = before == -1 or (0 <= before < place and len(texts[before][2]) == BLOCK)
        own = before, salt if before < 0 else -1, tokens
        if not tokens or min(tokens) < 0 or not follows or not 0 <= salt < len(salts) or own in seen:
            raise ValueError("no texts")
        seen.add(own)
        texts.append((before, str(salts[salt]), tokens))
    return texts


def _slabs(file: BinaryIO, store: Store, checks: Sequence[int], places: _Places) -> Iterator[Tensor]:
    """Yield the first slabs of a file, mapped copy-on-write: writes to them stay in this process.

    On other devices they are copies.
    """
    for place, check in zip(places.each(), checks, strict=False):
        mapped = mmap.mmap(file.fileno(), places.size, access=mmap.ACCESS_COPY, offset=place)
        if zlib.crc32(mapped) != check:
            raise BadPrefixFile("it is damaged")
        rows = torch.frombuffer(mapped, dtype=torch.uint8).view(store.shape.dtype).view(store.pool.slab_size)
        yield rows.to(store.shape.device)
