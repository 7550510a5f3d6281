"""Reads a GGUF file's header: its keys and its descriptions of tensors. Everything in the file is checked before it is
used.

Layout (little-endian): magic, version, number of tensors, number of keys, the keys, a description of each tensor, and
the tensors' bytes from the next multiple of the alignment on. Memory use follows the file's size: counts and lengths
beyond the end of the file are refused.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from parlay.models.weights.formats import FORMATS, Format
from parlay.types import ParlayError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # the same in little-endian files
_STRING, _ARRAY = 8, 9
TOKENIZER = "tokenizer.ggml."
"""The prefix of all keys of the tokenizer."""
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MOST_ITEMS = 1 << 24
"""Most items of an array, a hundred times a large vocabulary."""
_MOST_KEYS, _MOST_TENSORS = 1 << 16, 1 << 20
_MOST_DIMENSIONS, _LARGEST = 4, 1 << 40
_LONGEST_NAME = 1 << 12
_ALIGNMENT, _LEAST_ALIGNMENT = 32, 8
_OTHER_FORMATS = {34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"}
_OTHER_FORMATS |= {24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
"""GGUF formats that Parlay does not read, named in errors."""


class BadGguf(ParlayError):
    """Raised for a file that is not GGUF, is damaged, or has content that Parlay does not read; the message says
    which."""


@dataclass(frozen=True, slots=True)
class Strings:
    """An array of ``count`` strings as encoded in the file: ``content`` has each string's length and then its bytes.

    Decoding a vocabulary's strings takes most of a header's time, and is needed only for a tokenizer that is not
    cached.
    """

    content: bytes
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> str:
        at, length_at = 0, _U64.unpack_from
        for _ in range(number):
            at += 8 + length_at(self.content, at)[0]
        return str(self.content[at + 8 : at + 8 + length_at(self.content, at)[0]], "utf-8")

    def read(self) -> list[str]:
        """Decode all strings. Raises ValueError for invalid UTF-8."""
        content, at, length_at = self.content, 0, _U64.unpack_from
        strings: list[str] = []
        for _ in range(self.count):
            end = at + 8 + length_at(content, at)[0]
            strings.append(str(content[at + 8 : end], "utf-8"))
            at = end
        return strings


Value = str | int | float | bool | Strings | tuple[int, ...] | tuple[float, ...] | tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's place: ``shape`` has the last dimension fastest, and ``offset`` is from the start of the file."""

    name: str
    format: Format
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        """The tensor's size in bytes."""
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows * self.format.row_bytes(self.shape[-1])


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header; ``tokenizer`` is a hash of the tokenizer's keys.

    ``places`` has the first and last byte of each key's record, including its name and type.
    """

    path: Path
    keys: dict[str, Value]
    tensors: tuple[TensorInfo, ...]
    tokenizer: str
    places: dict[str, tuple[int, int]]


def read(path: Path) -> Header:
    """Read the header of the GGUF file at ``path``. Raises BadGguf, in one line, if that fails.

    A file that has not changed is not read again, as opening a model needs its header several times.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise BadGguf(f"{path} can't be read as a GGUF file: {error}") from None
    return _read(path, found.st_size, found.st_mtime_ns, found.st_ino)


@lru_cache(maxsize=2)
def _read(path: Path, size: int, changed: int, number: int) -> Header:
    """Read the header; the other arguments identify the file's state for the cache."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(content).header(path)
    except (OSError, ValueError) as error:  # an empty file can't be mapped
        raise BadGguf(f"{path} can't be read as a GGUF file: {error}") from None


class _Reader:
    """Reads ``content`` from front to back. Every method raises ValueError for invalid bytes."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._size, self._at = content, len(content), 0

    def header(self, path: Path) -> Header:
        self._start()
        tensors, keys = self._number(_U64), self._number(_U64)
        if tensors > _MOST_TENSORS or keys > _MOST_KEYS:
            raise ValueError(f"it claims {tensors} tensors and {keys} keys")
        values, places = self._keys(keys)
        infos = tuple(self._tensor() for _ in range(tensors))
        return Header(path, values, self._placed(infos, _alignment(values)), self._tokenizer(places), places)

    def _tokenizer(self, places: dict[str, tuple[int, int]]) -> str:
        digest = hashlib.sha256()
        for key, (begin, end) in sorted(places.items()):
            if key.startswith(TOKENIZER):
                digest.update(self._content[begin:end])
        return digest.hexdigest()

    def _start(self) -> None:
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number(_U32)
        if version & 0xFFFF == 0:
            raise ValueError("it is big-endian: convert it to little-endian")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, and Parlay reads versions 2 and 3: convert the model again")

    def _keys(self, count: int) -> tuple[dict[str, Value], dict[str, tuple[int, int]]]:
        """Read all keys' values, and the places of their records."""
        values: dict[str, Value] = {}
        places: dict[str, tuple[int, int]] = {}
        for _ in range(count):
            begin = self._at
            key = self._string(_LONGEST_NAME)
            if key in values:
                raise ValueError(f"the key {key!r} occurs twice")
            values[key] = self._value(key)
            places[key] = begin, self._at
        return values, places

    def _value(self, key: str) -> Value:
        kind = self._number(_U32)
        if kind == _STRING:
            return self._string(self._size)
        if kind == _ARRAY:
            return self._array(key)
        return self._numbers(key, kind, 1)[0]

    def _array(self, key: str) -> Value:
        kind, count = self._number(_U32), self._number(_U64)
        if count > _MOST_ITEMS:
            raise ValueError(f"the key {key!r} claims {count} items")
        return self._strings(count) if kind == _STRING else self._numbers(key, kind, count)

    def _numbers(self, key: str, kind: int, count: int) -> tuple[int, ...] | tuple[float, ...] | tuple[bool, ...]:
        letter = _NUMBERS.get(kind)
        if letter is None:
            raise ValueError(f"the key {key!r} has a value of the unknown type {kind}")
        layout = f"<{count}{letter}"
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _strings(self, count: int) -> Strings:
        """Find the end of the strings in one loop without calls, for speed."""
        content, at, last, length_at = self._content, self._at, self._size - 8, _U64.unpack_from
        for _ in range(count):
            if at > last:
                raise ValueError("it is cut short or damaged: get it again")
            at += 8 + length_at(content, at)[0]
        return Strings(self._take(at - self._at), count)

    def _string(self, longest: int) -> str:
        length = self._number(_U64)
        if length > longest:
            raise ValueError(f"a string in it claims {length} bytes")
        return str(self._take(length), "utf-8")

    def _number(self, layout: struct.Struct) -> int:
        number: int = layout.unpack(self._take(layout.size))[0]
        return number

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > self._size:
            raise ValueError("it is cut short: get it again")
        taken = self._content[self._at : end]
        self._at = end
        return taken

    def _tensor(self) -> TensorInfo:
        """Read one tensor's description, whose offset counts from the start of the data."""
        name = self._string(_LONGEST_NAME)
        dimensions = self._number(_U32)
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"the tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._number(_U64) for _ in range(dimensions))[::-1]
        kind, offset = self._number(_U32), self._number(_U64)
        if min(shape) < 1 or max(shape) > _LARGEST:
            raise ValueError(f"the tensor {name!r} has the shape {list(shape)}")
        if kind not in FORMATS:
            stored = _OTHER_FORMATS.get(kind, f"the unknown type {kind}")
            known = ", ".join(format.name for format in FORMATS.values())
            raise ValueError(f"the tensor {name!r} is stored as {stored}, which Parlay does not read; it reads {known}")
        FORMATS[kind].row_bytes(shape[-1])
        return TensorInfo(name, FORMATS[kind], shape, offset)

    def _placed(self, infos: tuple[TensorInfo, ...], alignment: int) -> tuple[TensorInfo, ...]:
        """The tensors in file order with offsets from the start of the file; each must be within it and overlap no
        other."""
        start = -(-self._at // alignment) * alignment
        placed = sorted((replace(info, offset=start + info.offset) for info in infos), key=lambda info: info.offset)
        if len({info.name for info in placed}) < len(placed):
            names = Counter(info.name for info in placed)
            raise ValueError(f"the tensor {names.most_common(1)[0][0]!r} occurs twice")
        free = start
        for info in placed:
            if info.offset % alignment:
                raise ValueError(f"the tensor {info.name!r} does not begin at a multiple of {alignment} bytes")
            if info.offset < free:
                raise ValueError(f"the tensor {info.name!r} lies over another")
            free = info.offset + info.bytes
            if free > self._size:
                raise ValueError(
                    f"it is cut short: the tensor {info.name!r} ends at byte {free} of {self._size}: get it again"
                )
        return tuple(placed)


def _alignment(keys: dict[str, Value]) -> int:
    """Read the alignment of tensors in bytes, which the format requires to be at least 8."""
    alignment = keys.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < _LEAST_ALIGNMENT or alignment & alignment - 1:
        raise ValueError(
            f"general.alignment is {alignment!r:.40}, which is not a power of two from {_LEAST_ALIGNMENT} on"
        )
    return alignment
