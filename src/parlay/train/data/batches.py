"""Batches of texts with their features.

A batch has answers of similar length, padded at the front. A seed fixes the order of batches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from parlay.train.data.features import Featured

_POOL = 256
"""This many texts are sorted by length before they are cut into batches."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """B texts, padded at the front to T tokens. Only the last R rows of each text are trained on: the longest answer
    has R tokens.

    ``states_BTF`` is float32; ``padding_B`` counts the padding rows of each text. ``known_BR``: whether the target
    chose the token after the row.
    """

    ids_BT: Tensor
    states_BTF: Tensor
    padding_B: Tensor
    known_BR: Tensor

    @property
    def rows(self) -> int:
        return self.known_BR.shape[1]

    def tokens_ahead(self, count: int) -> Tensor:
        """Return int64 ``[B, R]``: the token ``count`` positions after each row; -1 after the end of the text."""
        ended = torch.full((len(self.ids_BT), count), -1)
        return torch.cat((self.ids_BT, ended), 1)[:, self.ids_BT.shape[1] + count - self.rows :]


def endless(texts: Sequence[Featured], tokens: int, longest: int, seed: int) -> Iterator[TrainingBatch]:
    """Yield batches of about ``tokens`` rows, epoch after epoch. Only the end of a text over ``longest`` tokens is
    used."""
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
    """Yield batches in which every text occurs once."""
    return (padded(group, longest) for group in _groups(sorted(texts, key=_answer_rows), tokens))


def _answer_rows(text: Featured) -> int:
    """Return the number of rows whose next token the target chose."""
    return len(text.ids_T) - text.answer + 1


def _groups(texts: Sequence[Featured], tokens: int) -> Iterator[list[Featured]]:
    """Group texts of similar length, from the shortest to the longest."""
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
    states_BTF = joined([text.states_TF for text in texts]).float()
    return TrainingBatch(ids_BT, states_BTF, padding_B, known_BT[:, ids_BT.shape[1] - rows :])
