"""Writes a GGUF file from records of its keys and blocks of its tensors, front to back.

`parlay.models.gguf.reader` describes the layout.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from parlay.models.weights.formats import Format
from parlay.system.user_cache import saved_whole
from parlay.types import ParlayError

USUAL = "Q8_0"
EMBEDDINGS = (USUAL, "Q5_0", "Q4_0")
"""Formats for a student's embedding, which is most of a small model's file."""
_VERSION, _ALIGNMENT = 3, 32
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9

KeyValue = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor to be written; ``shape`` has the last dimension fastest."""

    name: str
    shape: tuple[int, ...]
    format: Format

    @property
    def rows(self) -> int:
        """The number of rows of the last dimension."""
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows

    @property
    def bytes(self) -> int:
        """The tensor's size in bytes."""
        return self.rows * self.format.row_bytes(self.shape[-1])


def record(key: str, value: KeyValue) -> bytes:
    """A key's record as encoded in a file. Integers become uint32 (int32 in arrays), other numbers float32."""
    return _text(key) + _value(value)


def packed_strings(texts: Iterable[str]) -> bytes:
    """The items of an array of strings, encoded as in `reader.Strings`."""
    return b"".join(map(_text, texts))


def write(
    path: Path, records: Sequence[bytes], plans: Sequence[TensorPlan], blocks: Iterable[Iterable[Tensor]]
) -> None:
    """Write the file atomically: if that fails, nothing of it is left and an older file stays.

    ``blocks`` are each tensor's rows, uint8, in any number of parts. Raises ParlayError for a path that can't be
    written or has too little room.
    """
    head = _head(records, plans)
    _check_room(path, len(head) + sum(plan.bytes + _gap(plan.bytes) for plan in plans))
    with saved_whole(path) as part, part.open("wb") as file:
        file.write(head)
        for plan, parts in zip(plans, blocks, strict=True):
            _write_tensor(file, plan, parts)


def _write_tensor(file: BinaryIO, plan: TensorPlan, parts: Iterable[Tensor]) -> None:
    size = sum(file.write(part.contiguous().numpy().reshape(-1).data) for part in parts)
    assert size == plan.bytes, f"{plan.name}: {size} bytes instead of {plan.bytes}"
    file.write(bytes(_gap(size)))


def _head(records: Sequence[bytes], plans: Sequence[TensorPlan]) -> bytes:
    """Everything before the tensors' bytes."""
    start = b"GGUF" + struct.pack("<IQQ", _VERSION, len(plans), len(records))
    head = b"".join((start, *records, *_infos(plans)))
    return head + bytes(_gap(len(head)))


def _infos(plans: Sequence[TensorPlan]) -> Iterator[bytes]:
    offset = 0
    for plan in plans:
        sizes = struct.pack(f"<I{len(plan.shape)}Q", len(plan.shape), *reversed(plan.shape))
        yield _text(plan.name) + sizes + struct.pack("<IQ", plan.format.number, offset)
        offset += plan.bytes + _gap(plan.bytes)


def _gap(size: int) -> int:
    return -size % _ALIGNMENT


def _check_room(path: Path, size: int) -> None:
    folder = next((folder for folder in path.absolute().parents if folder.is_dir()), Path("/"))
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ParlayError(f"{path} would take {size / 1e6:,.0f} MB, and {folder} has {free / 1e6:,.0f} MB left")


def _text(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _value(value: KeyValue) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    texts = [item for item in value if isinstance(item, str)]
    if texts:
        return struct.pack("<IIQ", _ARRAY, _STRING, len(texts)) + packed_strings(texts)
    whole = all(isinstance(item, int) for item in value)
    letter, kind = ("i", _I32) if whole else ("f", _F32)
    return struct.pack(f"<IIQ{len(value)}{letter}", _ARRAY, kind, len(value), *value)
