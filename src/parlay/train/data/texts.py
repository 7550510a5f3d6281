"""Tokenised texts on disk, in shards. A shard is written whole or not at all, so a killed writer loses one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from parlay.system.user_cache import saved_whole
from parlay.types import ParlayError

_PATTERN = "texts-{:05d}.npz"
_GIVEN = "texts-given-{:05d}.npz"


@dataclass(frozen=True, slots=True)
class TrainingText:
    """One conversation as token ids; the target wrote those from ``answer`` on."""

    ids: tuple[int, ...]
    answer: int


def shard_path(folder: Path, number: int) -> Path:
    """Where shard ``number`` of ``folder`` is, or will be."""
    return folder / _PATTERN.format(number)


def save_shard(path: Path, texts: Sequence[TrainingText]) -> None:
    """Writes the texts; ``path`` is replaced in one move."""
    ids = np.array([token for text in texts for token in text.ids], dtype=np.int32)
    lengths = np.array([len(text.ids) for text in texts], dtype=np.int32)
    answers = np.array([text.answer for text in texts], dtype=np.int32)
    with saved_whole(path) as part, part.open("wb") as file:
        np.savez(file, ids=ids, lengths=lengths, answers=answers)


def load_shard(path: Path) -> list[TrainingText]:
    """The texts of one shard. Raises ParlayError for a file that is damaged."""
    try:
        with np.load(path, allow_pickle=False) as held:
            ids, lengths, answers = held["ids"], held["lengths"], held["answers"]
    except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
        raise ParlayError(f"{path} is damaged ({error}): delete it, and it is written again") from error
    if int(lengths.sum()) != len(ids) or len(lengths) != len(answers):
        raise ParlayError(f"{path} is damaged (its lengths do not add up): delete it, and it is written again")
    return list(_split(ids, lengths, answers))


def given_path(folder: Path, number: int) -> Path:
    """Where shard ``number`` of the texts is that the target reads but did not write."""
    return folder / _GIVEN.format(number)


def shards(folder: Path) -> list[Path]:
    """The shards that are there, by number."""
    return sorted(folder.glob("texts-*.npz"))


def _split(
    ids: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32], answers: npt.NDArray[np.int32]
) -> Iterator[TrainingText]:
    ends = np.cumsum(lengths)
    for end, length, answer in zip(ends.tolist(), lengths.tolist(), answers.tolist(), strict=True):
        yield TrainingText(tuple(ids[end - length : end].tolist()), answer)
