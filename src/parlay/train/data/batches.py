"""Batches of featured texts: of like lengths together, padded at the end, in an order that a seed fixes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from parlay.train.data.features import Featured

_POOL = 256
"""Texts that are sorted by length before they are cut into batches."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """B texts, padded to T tokens. ``known_BT``: where the target's next token is known; see `Featured`."""

    ids_BT: Tensor
    taps_BTF: Tensor
    best_ids_BTK: Tensor
    best_probs_BTK: Tensor
    known_BT: Tensor


def endless(texts: Sequence[Featured], tokens: int, longest: int, seed: int) -> Iterator[TrainingBatch]:
    """Epoch after epoch, in batches of about so many tokens; of texts over ``longest`` tokens the end."""
    epoch = 0
    while True:
        order = random.Random(seed * 1_000_003 + epoch).sample(range(len(texts)), len(texts))
        for start in range(0, len(order), _POOL):
            pool = sorted(order[start : start + _POOL], key=lambda place: len(texts[place].ids_T))
            groups = list(_groups([texts[place] for place in pool], tokens, longest))
            random.Random(seed + start + epoch).shuffle(groups)
            yield from (padded(group, longest) for group in groups)
        epoch += 1


def in_order(texts: Sequence[Featured], tokens: int, longest: int) -> Iterator[TrainingBatch]:
    """All texts once."""
    return (padded(group, longest) for group in _groups(texts, tokens, longest))


def _groups(texts: Sequence[Featured], tokens: int, longest: int) -> Iterator[list[Featured]]:
    group: list[Featured] = []
    widest = 0
    for text in texts:
        width = max(widest, min(len(text.ids_T), longest))
        if group and width * (len(group) + 1) > tokens:
            yield group
            group, width = [], min(len(text.ids_T), longest)
        group.append(text)
        widest = width
    if group:
        yield group


def padded(texts: Sequence[Featured], longest: int) -> TrainingBatch:
    """One batch of these texts."""

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return pad_sequence([part[-longest:] for part in parts], batch_first=True)

    known = [torch.arange(len(text.ids_T)) >= text.answer - 1 for text in texts]
    return TrainingBatch(
        joined([text.ids_T for text in texts]).long(),
        joined([text.taps_TF for text in texts]),
        joined([text.best_ids_TB for text in texts]).long(),
        joined([text.best_probs_TB for text in texts]).float(),
        joined(known),
    )
