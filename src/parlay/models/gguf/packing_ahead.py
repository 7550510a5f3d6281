"""Packs the matrices of a GGUF file while Python still imports torch, on a thread that does not need torch.

Imports keep one core busy for a second, in which another core packs what the compiled decoder will read.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from parlay.compiled import structs
from parlay.compiled.library import NotLoaded, load
from parlay.models.families.table import GGUF_FAMILIES
from parlay.models.gguf.reader import Header, read
from parlay.models.weights.formats import INDEXED, DamagedWeights
from parlay.system.machine import available_bytes
from parlay.types import ParlayError

_LINE, _HUGE = 64, 2 << 20
_GROUP, _PART = 1 << 26, 1 << 25
"""Bytes of the file that one call packs, and most bytes of one matrix in it. The call's pages stay in memory until it
ends."""
_SURELY_FITS = 0.5
"""Share of the free memory up to which a file is packed ahead; some layers of a larger one may have to stay on disk."""
_PERMUTED = ("attn_q.weight", "attn_k.weight")
"""Matrices whose rows are permuted in families that rotate neighbouring rows."""
_OF_KEYS = re.compile(r"blk\.(\d+)\.attn_[kv]\.weight")
_begun: dict[Path, PackingAhead] = {}


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a matrix: bytes ``begin`` to ``end`` of the file, which are packed to offset ``place`` of the panels."""

    name: str
    kind: int
    rows: int
    inputs: int
    begin: int
    end: int
    place: int


class PackingAhead:
    """The packed matrices of one file; all `jobs` must run before the panels are read."""

    def __init__(self, header: Header, core: structs.Core) -> None:
        self.core, self._path, self._stamp = core, header.path, _stamp(header.path)
        with header.path.open("rb") as opened:
            self._file = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        self._places, size = _places(header, core)
        self.memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        start = _address(self.memory)
        self._start = start + -start % _HUGE
        self._pool = ThreadPoolExecutor(1, "packing-ahead")
        groups = list(_grouped(_parts(header, self._places, core)))
        self._groups = [(group, self._pool.submit(self._pack, group)) for group in groups]

    def panels(self, offset: int) -> int | None:
        """The address of the packed matrix that is at ``offset`` in the file; None if it is not packed here."""
        place = self._places.get(offset)
        return None if place is None else self._start + place

    def jobs(self) -> list[Callable[[], None]]:
        """Calls that pack what the thread has not started, or wait for it. They raise DamagedWeights for numbers that
        are not finite."""
        return [partial(self._finish, *each) for each in self._groups]

    def cancel(self) -> None:
        """Let the thread start no further part."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def is_of(self, path: Path) -> bool:
        """Whether the file at ``path`` has not changed since it was opened."""
        return _stamp(path) == self._stamp

    def _finish(self, group: list[_Part], future: Future[None]) -> None:
        if future.cancel():
            self._pack(group)
        else:
            future.result()

    def _pack(self, group: list[_Part]) -> None:
        stored = _address(self._file)
        packings = (structs.Packing * len(group))(
            *(
                structs.Packing(part.kind, part.rows, part.inputs, stored + part.begin, self._start + part.place)
                for part in group
            )
        )
        damaged = int(self.core.pack_all(packings, len(group)))
        if damaged >= 0:
            raise DamagedWeights(f"the tensor {group[damaged].name!r} of {self._path}")
        begin = group[0].begin // mmap.PAGESIZE * mmap.PAGESIZE
        self._file.madvise(mmap.MADV_DONTNEED, begin, group[-1].end - begin)


@contextmanager
def packing_ahead(path: Path) -> Iterator[None]:
    """Start packing the GGUF file at ``path`` during the block, for code that loads its weights; see `take`.

    Files that can't be read, or may be too large for memory, are skipped; loading them reports why.
    """
    fits = path.is_file() and path.stat().st_size < _SURELY_FITS * available_bytes()
    ahead = _begin(path) if sys.platform == "linux" and fits else None
    if ahead is None:
        yield
        return
    _begun[path] = ahead
    del ahead  # the one who takes it frees it
    try:
        yield
    finally:
        left = _begun.pop(path, None)
        if left is not None:
            left.cancel()


def take(path: Path) -> PackingAhead | None:
    """Take over the packing of this file; the caller must run its `jobs`. None if it was not started."""
    ahead = _begun.pop(path, None)
    return ahead if ahead is not None and ahead.is_of(path) else None


def _begin(path: Path) -> PackingAhead | None:
    try:
        header, core = read(path), load()
        return PackingAhead(header, core) if header.keys.get("split.count", 1) == 1 else None
    except (ParlayError, NotLoaded, OSError, ValueError):
        return None


def _places(header: Header, core: structs.Core) -> tuple[dict[int, int], int]:
    """The offset of each packed matrix by its offset in the file, and the bytes of all."""
    family = GGUF_FAMILIES.get(str(header.keys.get("general.architecture")))
    if family is None or family.gguf is None:
        return {}, 0
    places, size, own = {}, 0, _layers_with_keys(header)
    for info in header.tensors:
        permuted = family.gguf.interleaved and info.name.endswith(_PERMUTED)
        fused = any(f".{name}." in info.name for name in family.gguf.names)
        of_keys = _OF_KEYS.fullmatch(info.name)
        unread = of_keys is not None and int(of_keys[1]) >= own
        if len(info.shape) != 2 or info.format.block == 1 or info.format in INDEXED or permuted or fused or unread:
            continue
        outputs, inputs = info.shape
        if outputs < core.panel:  # padding to a panel would take many times the file's size
            continue
        places[info.offset] = size
        size += -(-outputs // core.panel) * core.panel_bytes(info.format.number, inputs)
        size += -size % _LINE
    return places, size


def _layers_with_keys(header: Header) -> float:
    """The number of first layers with keys of their own; later ones may share these keys."""
    name = header.keys.get("general.architecture")
    layers, sharing = (header.keys.get(f"{name}.{key}") for key in ("block_count", "attention.shared_kv_layers"))
    return layers - sharing if isinstance(layers, int) and isinstance(sharing, int) else math.inf


def _parts(header: Header, places: dict[int, int], core: structs.Core) -> Iterator[_Part]:
    """Every matrix, whole or in parts of whole panels, in file order."""
    for info in header.tensors:
        if info.offset not in places:
            continue
        outputs, inputs = info.shape
        kind, row = info.format.number, info.format.row_bytes(inputs)
        step = max(_PART // (row * core.panel), 1) * core.panel
        for first in range(0, outputs, step):
            rows, begin = min(step, outputs - first), info.offset + first * row
            place = places[info.offset] + first // core.panel * core.panel_bytes(kind, inputs)
            yield _Part(info.name, kind, rows, inputs, begin, begin + rows * row, place)


def _grouped(parts: Iterator[_Part]) -> Iterator[list[_Part]]:
    """Groups of neighbouring parts, each of about `_GROUP` bytes."""
    group: list[_Part] = []
    for part in parts:
        group.append(part)
        if part.end - group[0].begin >= _GROUP:
            yield group
            group = []
    if group:
        yield group


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns
