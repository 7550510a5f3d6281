"""Tables beside a checkpoint that are mapped from their file: what it says of them is checked, and nothing is read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from parlay.models.weights.shapes import BadCheckpoint

_PART = 1 << 20
"""Keys that are checked together."""
_MOST_HEADER = 1 << 20
_KINDS: dict[str, np.dtype[Any]] = {
    "I64": np.dtype(np.int64),
    "BF16": np.dtype(np.uint16),
    "F32": np.dtype(np.float32),
}


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its numbers begin. Raises BadCheckpoint."""
    if path.exists() and not path.is_file():
        raise BadCheckpoint(f"can't read {path}: it is no file")  # a pipe would be waited for
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size <= _MOST_HEADER else None
    except FileNotFoundError:
        raise BadCheckpoint(f"{path} is not there: the model reads a table of n-grams; copy it, too") from None
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from None
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__"), dict):
        raise damaged(path, "its header is no table's")
    return header, 8 + size


def check_tensor(path: Path, header: dict[str, Any], name: str, expected: tuple[str, list[int]]) -> None:
    """Raises BadCheckpoint for a tensor of another type or shape, or without a place in the file."""
    said = header.get(name)
    said = said if isinstance(said, dict) else {}
    found = said.get("dtype"), said.get("shape")
    if found != expected:
        raise BadCheckpoint(f"{path} has {name} {found!s:.60} where the model's config.json asks for {expected}")
    places = said.get("data_offsets")
    if not isinstance(places, list) or len(places) != 2 or not all(type(place) is int for place in places):
        raise damaged(path, f"no place of {name}")


def map_tensor(path: Path, said: dict[str, Any], begin: int) -> npt.NDArray[Any]:
    """One tensor of the file, mapped. Raises BadCheckpoint for a file that is cut short."""
    kind, (first, end) = _KINDS[said["dtype"]], said["data_offsets"]
    size = math.prod(said["shape"]) * kind.itemsize
    if first < 0 or end - first != size or begin + end > path.stat().st_size:
        raise damaged(path, f"{size} bytes would be at {first} to {end}, and it has {path.stat().st_size - begin}")
    return np.memmap(path, kind, "r", begin + first, tuple(said["shape"]))


def damaged(path: Path, why: str) -> BadCheckpoint:
    """The error of a file that can't be a table."""
    return BadCheckpoint(f"{path} is damaged or cut short ({why}): copy it again")


def rise(keys_F: npt.NDArray[np.int64]) -> bool:
    """Whether each key is larger than the one before."""
    parts = range(0, len(keys_F), _PART)
    return all(bool((np.diff(keys_F[begin : begin + _PART + 1]) > 0).all()) for begin in parts)
