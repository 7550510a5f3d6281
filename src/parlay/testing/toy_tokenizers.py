"""Toy tokenizers: any two of them write the same letters, and cut text into other tokens under other ids."""

from __future__ import annotations

import random

from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

_FIRST_LETTER = 0x4E00  # ideographs: thousands of them, and none is a space


def toy_tokenizer(vocab_size: int, seed: int = 0) -> PreTrainedTokenizerFast:
    """Half of the tokens are single letters, the others pairs of them; which pairs, and all ids, hang on the seed."""
    chance = random.Random(seed)
    letters = [chr(_FIRST_LETTER + place) for place in range((vocab_size + 1) // 2)]
    pairs: dict[tuple[str, str], None] = {}
    while len(letters) + len(pairs) < vocab_size:
        pairs[chance.choice(letters), chance.choice(letters)] = None
    pieces = [*letters, *("".join(pair) for pair in pairs)]
    chance.shuffle(pieces)
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocab=vocabulary, merges=list(pairs))))
