"""Tables in a checkpoint's folder, memory-mapped: their headers are checked, and their numbers are not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy.typing as npt

from parlay.models.weights.shapes import BadCheckpoint
from parlay.system.mapped_tensors import BadTensorFile, TensorFile


def open_table(path: Path) -> TensorFile:
    """Map a table's file. Raises BadCheckpoint if it can't be read."""
    try:
        return TensorFile.open(path)
    except FileNotFoundError:
        raise BadCheckpoint(f"{path} is not there: the model reads a table of n-grams; copy it, too") from None
    except OSError as error:
        raise BadCheckpoint(f"can't read {path}: {error.strerror}") from None
    except BadTensorFile as error:
        raise damaged(path, str(error)) from None


def map_tensor(path: Path, file: TensorFile, name: str, expected: tuple[str, list[int]]) -> npt.NDArray[Any]:
    """Map one tensor. Raises BadCheckpoint if it has another type or shape, or is damaged."""
    found = file.described(name)
    if found != expected:
        raise BadCheckpoint(f"{path} has {name} {found!s:.60} where the model's config.json asks for {expected}")
    try:
        return file.tensor(name)
    except BadTensorFile as error:
        raise damaged(path, str(error)) from None


def damaged(path: Path, why: str) -> BadCheckpoint:
    """The error for a damaged table; ``why`` is a clause that follows its path."""
    return BadCheckpoint(f"{path} {why}: the table is damaged or cut short; copy it again")
