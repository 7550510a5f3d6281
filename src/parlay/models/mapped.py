"""Tables beside a checkpoint that are mapped from their file: what it says of them is checked, and nothing is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy.typing as npt

from parlay.models.weights.shapes import BadCheckpoint
from parlay.system.mapped_tensors import BadTensorFile, TensorFile


def open_table(path: Path) -> TensorFile:
    """Map a table. Raises BadCheckpoint."""
    try:
        return TensorFile.open(path)
    except FileNotFoundError:
        raise BadCheckpoint(f"{path} is not there: the model reads a table of n-grams; copy it, too") from None
    except OSError as error:
        raise BadCheckpoint(f"can't read {path}: {error.strerror}") from None
    except BadTensorFile as error:
        raise damaged(path, str(error)) from None


def map_tensor(path: Path, file: TensorFile, name: str, expected: tuple[str, list[int]]) -> npt.NDArray[Any]:
    """Map one tensor. Raises BadCheckpoint for one of another type or shape, or that is damaged."""
    found = file.described(name)
    if found != expected:
        raise BadCheckpoint(f"{path} has {name} {found!s:.60} where the model's config.json asks for {expected}")
    try:
        return file.tensor(name)
    except BadTensorFile as error:
        raise damaged(path, str(error)) from None


def damaged(path: Path, why: str) -> BadCheckpoint:
    """The error of a file that can't be a table; ``why`` is a clause that its path can stand before."""
    return BadCheckpoint(f"{path} {why}: the table is damaged or cut short; copy it again")
