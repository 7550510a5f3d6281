"""Batches of texts with features: texts with answers of similar length, left-padded, in an order fixed by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from parlay.train.data.features import Featured

_POOL = 256
"""Number of texts that are sorted by length and then cut into batches."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """B texts, left-padded to T tokens.

    Only the last R rows of each text are trained on; R is the most that any text of the batch needs. ``states_BTF`` are
    float32. ``padding_B`` counts the padding rows in front of each text. ``known_BR`` is true for rows whose next token
    belongs to the part that is trained on: an answer, or the whole text.
    """

    ids_BT: Tensor
    states_BTF: Tensor
    padding_B: Tensor
    known_BR: Tensor

    @property
    def rows(self) -> int:
        return self.known_BR.shape[1]

    def tokens_ahead(self, count: int) -> Tensor:
        """Return the token ``count`` places after each of the last R rows, int64 ``[B, R]``; -1 after the end of the
        text."""
        ended = torch.full((len(self.ids_BT), count), -1)
        return torch.cat((self.ids_BT, ended), 1)[:, self.ids_BT.shape[1] + count - self.rows :]


def endless(texts: Sequence[Featured], tokens: int, longest: int, seed: int) -> Iterator[TrainingBatch]:
    """Yield batches epoch after epoch, each of about ``tokens`` trained rows; texts longer than ``longest`` keep only
    their end."""
    epoch = 0
    while True:
        order = random.Random(seed * 1_000_003 + epoch).sample(range(len(texts)), len(texts))
        for start in range(0, len(order), _POOL):
            pool = sorted((texts[place] for place in order[start : start + _POOL]), key=_answer_rows)
            groups = list(_groups(pool, tokens))
            random.Random(seed + start + epoch).shuffle(groups)
            yield from (padded(group, longest) for group in groups)
        epoch += 1


def in_order(texts: Sequence[Featured], tokens: int, longest: int) -> Iterator[TrainingBatch]:
    """Yield batches that contain every text once, from short answers to long ones."""
    return (padded(group, longest) for group in _groups(sorted(texts, key=_answer_rows), tokens))


def _answer_rows(text: Featured) -> int:
    """Return the number of rows from which the answer's tokens, and the token after it, are predicted."""
    return len(text.ids_T) - text.answer + 1


def _groups(texts: Sequence[Featured], tokens: int) -> Iterator[list[Featured]]:
    """Group texts, given from short answers to long ones, so that a padded group has at most about ``tokens`` trained
    rows."""
    group: list[Featured] = []
    for text in texts:
        if group and _answer_rows(text) * (len(group) + 1) > tokens:
            yield group
            group = []
        group.append(text)
    if group:
        yield group


def padded(texts: Sequence[Featured], longest: int) -> TrainingBatch:
    """Make one batch of these texts, on the default device."""
    device = torch.get_default_device()

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return pad_sequence([part[-longest:].to(device) for part in parts], batch_first=True, padding_side="left")

    ids_BT = joined([text.ids_T for text in texts]).long()
    known_BT = joined([torch.arange(len(text.ids_T)) >= text.answer - 1 for text in texts])
    rows = int(known_BT.any(0).sum())
    padding_B = torch.tensor([ids_BT.shape[1] - min(len(text.ids_T), longest) for text in texts])
    states_BTF = joined([text.last(longest, device) for text in texts]).float()
    return TrainingBatch(ids_BT, states_BTF, padding_B, known_BT[:, ids_BT.shape[1] - rows :])
