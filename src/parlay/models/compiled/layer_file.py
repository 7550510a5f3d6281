"""The file of a model's packed layers or experts: its header, and how it is written and opened."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from parlay.cache.budget import format_bytes
from parlay.compiled import structs
from parlay.models.compiled.memory import whole_blocks
from parlay.system.user_cache import written_whole
from parlay.types import ParlayError

_MAGIC = b"parlay layers 1\n"
_BLOCK = structs.STREAM_BLOCK
_HEADER_OF_LAYER = 96  # most bytes of the header per layer
_PIECE = 1 << 24


class Place(NamedTuple):
    """A layer's place in the file, and its checksum."""

    offset: int
    bytes: int
    sum: int


def open_past_cache(path: Path) -> tuple[int, bool]:
    """Open the file for direct reads past the page cache if the file system allows that; returns the descriptor and
    whether it does."""
    if sys.platform == "linux":
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            try:
                os.preadv(descriptor, [whole_blocks(_BLOCK).numpy().data], 0)
            except OSError:
                os.close(descriptor)
            else:
                return descriptor, True
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if sys.platform == "darwin":
        import fcntl  # here, because some systems have no such module

        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
    return descriptor, False


def in_blocks(size: int) -> int:
    """Round a size up to the block size of direct reads."""
    return size + -size % _BLOCK


def offset_of_layers(count: int) -> int:
    """The offset of the first layer in a file of ``count`` layers."""
    needed = len(_MAGIC) + 64 + 32 + _HEADER_OF_LAYER * count
    return needed + -needed % _BLOCK


def _header(places: Sequence[Place]) -> bytes:
    content = json.dumps({"layers": places}).encode()
    head = _MAGIC + hashlib.sha256(content).hexdigest().encode() + content
    return head.ljust(offset_of_layers(len(places)))


def read_header(head: bytes) -> list[Place]:
    """Read the layers' places from the header. Raises ValueError, KeyError or TypeError if it is not a valid header."""
    begin = len(_MAGIC) + 64
    content = head[begin:].rstrip()
    if not head.startswith(_MAGIC) or hashlib.sha256(content).hexdigest().encode() != head[len(_MAGIC) : begin]:
        raise ValueError("no header, or a damaged one")
    places = [Place(*place) for place in json.loads(content)["layers"]]
    if not all(type(number) is int and 0 <= number < 1 << 64 for place in places for number in place):
        raise ValueError("a header of other things than numbers")
    return places


def write_layers(path: Path, core: structs.Core, sizes: Sequence[int], pack: Callable[[int, Tensor], None]) -> None:
    """Write the file; ``pack(number, memory)`` fills memory with one layer. Raises ParlayError if the disk has no
    room."""
    first = offset_of_layers(len(sizes))
    offsets = list(accumulate(sizes, initial=first))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free < offsets[-1]:
            raise _no_room(path.parent, offsets[-1])
        with written_whole(path, mode=0o600) as part, part.open("r+b", buffering=0) as file:
            region, places = whole_blocks(max(sizes)), []
            file.seek(first)
            for number, size in enumerate(sizes):
                region.zero_()
                pack(number, region)
                _write(file.fileno(), region[:size].numpy().data)
                places.append(Place(offsets[number], size, int(core.stream_sum(region.data_ptr(), size))))
            os.pwrite(file.fileno(), _header(places), 0)
            os.fsync(file.fileno())
            if sys.platform == "linux":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise _no_room(path.parent, offsets[-1], error.strerror) from None


def _write(file: int, content: memoryview) -> None:
    for begin in range(0, len(content), _PIECE):
        piece = content[begin : begin + _PIECE]
        while piece:
            piece = piece[os.write(file, piece) :]


def _no_room(folder: Path, size: int, why: str | None = None) -> ParlayError:
    return ParlayError(
        f"the packed layers of a model that does not fit into memory take {format_bytes(size)} in {folder}, and "
        f"{why or 'there is less room'}: free some, or name another folder by XDG_CACHE_HOME"
    )
