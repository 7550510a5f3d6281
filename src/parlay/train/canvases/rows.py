"""The rows that canvas recipes are trained on: prompts with answers, and pieces of documents, as token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from parlay.train.data.prompts import ChatFrame
from parlay.train.data.user_texts import TrainingText, UserTexts
from parlay.types import ParlayError

HELD_OUT = 20
"""One row in this many is held out: measured and never trained on."""
_SHORTEST = 8
"""Shorter pieces of a document, in tokens, are left out."""


class Words(NamedTuple):
    """How texts become ids.

    ``encode`` adds no special tokens; ``begin`` are the ids before documents, and ``end`` is the id after each text.
    ``frame`` is the model's chat template around a user's words. ``marks`` are special tokens' spellings, which texts
    may not contain.
    """

    encode: Callable[[str], Sequence[int]]
    begin: tuple[int, ...]
    end: int
    frame: ChatFrame
    marks: tuple[str, ...] = ()

    def plain(self, text: str) -> Sequence[int]:
        """Return the ids of a user's text, with each of ``marks`` replaced by a line end."""
        for mark in self.marks:
            text = text.replace(mark, "\n")
        return self.encode(text)


class RowBatch(NamedTuple):
    """B rows of T tokens. Places from ``length_B`` on are padding with end tokens; the answer begins at
    ``answer_B``."""

    ids_BT: Tensor
    answer_B: Tensor
    length_B: Tensor

    @property
    def learned_BT(self) -> Tensor:
        """True, bool, at answers and all end tokens after them: diffusion models learn an answer's length from the
        padding."""
        return torch.arange(self.ids_BT.shape[1])[None] >= self.answer_B[:, None]

    @property
    def text_BT(self) -> Tensor:
        """True, bool, at answers and one end token each."""
        return self.learned_BT & (torch.arange(self.ids_BT.shape[1])[None] < self.length_B[:, None])


def batch_of(rows: Sequence[TrainingText], end: int, multiple: int) -> RowBatch:
    """Pad rows with end tokens to one length, a multiple of ``multiple``."""
    longest = max(len(row.ids) for row in rows)
    size = -(-longest // multiple) * multiple
    ids = [[*row.ids, *[end] * (size - len(row.ids))] for row in rows]
    return RowBatch(
        torch.tensor(ids), torch.tensor([row.answer for row in rows]), torch.tensor([len(row.ids) for row in rows])
    )


@dataclass(frozen=True, slots=True)
class Drawn:
    """Draws batches of random rows. A batch depends only on seed and step."""

    rows: Sequence[TrainingText]
    end: int
    multiple: int
    seed: int

    def batch(self, step: int, count: int) -> RowBatch:
        """Draw ``count`` rows."""
        chosen = np.random.default_rng((self.seed, step)).integers(len(self.rows), size=count)
        return batch_of([self.rows[place] for place in chosen.tolist()], self.end, self.multiple)


def rows_of(texts: UserTexts, words: Words, length: int) -> list[TrainingText]:
    """Make rows of at most ``length`` tokens: longer documents are cut into pieces, longer conversations left out.

    Prompts get the model's chat template, if it has one, unless they were recorded with it. Raises ParlayError if there
    are fewer than two rows.
    """
    rows: list[TrainingText] = []
    for each in texts.conversations:
        prompt = tuple(words.encode(each.prompt)) if each.framed else words.frame.around(words.plain(each.prompt))
        ids = (*prompt, *words.plain(each.answer), words.end)
        if len(ids) <= length:
            rows.append(TrainingText(ids, max(1, len(prompt))))
    if len(rows) < len(texts.conversations):
        left, all_of = len(texts.conversations) - len(rows), len(texts.conversations)
        print(f"{left} of {all_of} conversations have more than {length} tokens: left out", flush=True)
    size = length - len(words.begin)
    for document in texts.documents:
        ids = (*words.plain(document), words.end)
        pieces = (ids[start : start + size] for start in range(0, len(ids), size))
        rows += [
            TrainingText((*words.begin, *piece), max(1, len(words.begin)))
            for piece in pieces
            if len(piece) >= _SHORTEST
        ]
    if len(rows) < 2:
        raise ParlayError(
            f"there are too few texts of at most {length} tokens to train on: give more, or raise --length"
        )
    return rows


def parted(rows: Sequence[TrainingText]) -> tuple[list[TrainingText], list[TrainingText]]:
    """Divide the rows into those to train on and those held out. Identical rows go to the same part.

    Raises ParlayError if all rows are identical.
    """
    held_out = list(rows[::HELD_OUT])
    known = {row.ids for row in held_out}
    learned = [row for row in rows if row.ids not in known]
    if not learned:
        raise ParlayError("all texts are alike, so that none can be held out: give others")
    return learned, held_out


def common_ids(rows: Sequence[TrainingText], size: int, vocab_size: int) -> Tensor:
    """Return the ``size`` tokens that occur most often in answers, int64, ascending.

    If fewer occur, low ids follow, because tokenizers number common tokens first.
    """
    counts_V = torch.zeros(vocab_size, dtype=torch.float64)
    for row in rows:
        counts_V += torch.bincount(torch.tensor(row.ids[row.answer :]), minlength=vocab_size)
    counts_V += torch.arange(vocab_size, 0, -1, dtype=torch.float64) * 1e-12
    return counts_V.topk(min(size, vocab_size)).indices.sort().values


def anchors(batch: RowBatch, count: int, draw: torch.Generator) -> Tensor:
    """Draw where ``count`` canvases or blocks begin in each row, ``[B, G]``: spread over its answer without the last
    place."""
    share_BG = (torch.arange(count) + torch.rand(len(batch.ids_BT), count, generator=draw)) / count
    room_B1 = (batch.length_B - 1 - batch.answer_B).clamp(min=1)[:, None]
    return batch.answer_B[:, None] + (share_BG * room_B1).long()
