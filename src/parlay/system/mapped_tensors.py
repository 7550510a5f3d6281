"""Memory-maps the tensors of safetensors files, and checks all of the header."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeGuard

import numpy as np
from numpy.typing import NDArray

KINDS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "U8": np.dtype("<u1"),
        "U16": np.dtype("<u2"),
        "U32": np.dtype("<u4"),
        "I64": np.dtype("<i8"),
        "F32": np.dtype("<f4"),
        "BF16": np.dtype("<u2"),
    }
)
"""The tensor types that can be read, by the format's names. bfloat16 numbers are read as raw 16-bit integers."""
_MOST_HEADER, _MOST_DIMENSIONS = 1 << 20, 8


class BadTensorFile(ValueError):
    """A file is invalid; the message is a clause that follows its path."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorFile:
    """A mapped file. ``metadata`` maps names to free text. The tensors' bytes begin at byte ``begin`` of
    ``content``."""

    content: mmap.mmap
    begin: int
    metadata: Mapping[str, str]
    _entries: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map a file. Raises OSError if the file can't be read, and BadTensorFile if it is no safetensors file."""
        if path.exists() and not path.is_file():
            raise BadTensorFile("is not a file")  # opening a pipe would block
        with path.open("rb") as file:
            try:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise BadTensorFile("is empty") from None
        size = int.from_bytes(content[:8], "little")
        if not 0 < size <= min(_MOST_HEADER, len(content) - 8):
            raise BadTensorFile("is not a safetensors file, or is cut short")
        try:
            entries = json.loads(content[8 : 8 + size])
        except (ValueError, RecursionError):
            entries = None
        metadata = entries.pop("__metadata__", {}) if isinstance(entries, dict) else None
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise BadTensorFile("has an invalid header")
        return cls(content, 8 + size, metadata, entries)

    @property
    def names(self) -> Collection[str]:
        """The tensors' names."""
        return self._entries.keys()

    def described(self, name: str) -> tuple[object, object]:
        """Return the type and the shape of a tensor as the header gives them; None for each that is missing."""
        entry = self._entries.get(name)
        return (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)

    def tensor(self, name: str) -> NDArray[Any]:
        """Map one tensor. Raises BadTensorFile if its entry is invalid, or if its bytes are outside the file or not
        aligned."""
        kind, shape = self.described(name)
        dtype = KINDS.get(kind) if isinstance(kind, str) else None
        places = self._entries[name].get("data_offsets") if dtype else None
        if dtype is None or not _are_counts(shape) or not _are_counts(places) or len(places) != 2:
            raise BadTensorFile(f"says no type, shape and place of {name}")
        if len(shape) > _MOST_DIMENSIONS:
            raise BadTensorFile(f"has {name} in {len(shape)} dimensions")
        first, end = places
        if end - first != math.prod(shape) * dtype.itemsize or self.begin + end > len(self.content):
            raise BadTensorFile(f"is cut short, or has no room for {name}")
        if (self.begin + first) % dtype.itemsize:  # compiled searches need aligned numbers
            raise BadTensorFile(f"has {name} at a place that is not a multiple of {dtype.itemsize}")
        found: NDArray[Any] = np.frombuffer(self.content, dtype, math.prod(shape), self.begin + first)
        return found.reshape(shape)


def _are_counts(values: object) -> TypeGuard[list[int]]:
    """Whether the value is a list of integers of at least 0."""
    return isinstance(values, list) and all(type(each) is int and each >= 0 for each in values)
