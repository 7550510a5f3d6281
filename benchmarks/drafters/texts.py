"""Texts to draft from: a random one that repeats itself as written text does, or a file."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path

VOCAB_SIZE = 4096

_FOLLOWERS = 24  # of each token
_COPY = 0.02  # chance, at each token, that a piece of the text so far comes again
_PIECE = (8, 48)
_SLIP = 0.03  # chance, at each copied token, that the copy ends


def markov(length: int, seed: int) -> list[int]:
    """A Markov chain whose tokens have few followers, by Zipf's law, and which copies pieces of its own past."""
    chance = random.Random(seed)
    ranks = list(accumulate(1 / rank for rank in range(1, _FOLLOWERS + 1)))
    common = list(accumulate(1 / rank for rank in range(1, VOCAB_SIZE + 1)))
    followers = [chance.choices(range(VOCAB_SIZE), cum_weights=common, k=_FOLLOWERS) for _ in range(VOCAB_SIZE)]
    text = [0]
    while len(text) < length:
        if chance.random() < _COPY:
            begin = chance.randrange(len(text))
            for token in text[begin : begin + chance.randint(*_PIECE)]:
                text.append(token)
                if chance.random() < _SLIP:
                    break
        text.append(chance.choices(followers[text[-1]], cum_weights=ranks)[0])
    return text[:length]


def of_file(path: Path, length: int) -> list[int]:
    """The beginning of a file in ids of the built-in tokenizer. Raises ValueError for one that is too short."""
    from parlay.models.fetch.resolving import resolve
    from parlay.models.loading import load_tokenizer

    tokens = load_tokenizer(resolve("parlay-mini")).encode(path.read_text(encoding="utf-8")[: 8 * length])
    if len(tokens) < length:
        raise ValueError(f"{path.name} has {len(tokens)} tokens, and {length} are needed")
    return [int(token) for token in tokens[:length]]
