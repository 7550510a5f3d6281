"""Small tokenizers of every kind, for tests in which a draft model's tokenizer differs from the target's."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_FIRST_LETTER = 0x4E00  # ideographs: thousands of them, and none is a space


def toy_tokenizer(vocab_size: int, seed: int = 0) -> PreTrainedTokenizerFast:
    """Make a tokenizer. Half of the tokens are single letters, and half are pairs of letters. The seed decides the
    pairs and all ids.

    Two such tokenizers with different seeds have the same letters, but cut text into other tokens with other ids.
    """
    chance = random.Random(seed)
    alphabet = [chr(_FIRST_LETTER + place) for place in range((vocab_size + 1) // 2)]
    pairs: dict[tuple[str, str], None] = {}
    while len(alphabet) + len(pairs) < vocab_size:
        pairs[chance.choice(alphabet), chance.choice(alphabet)] = None
    pieces = [*alphabet, *("".join(pair) for pair in pairs)]
    chance.shuffle(pieces)
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return _letterwise(vocabulary, list(pairs))


def letters(alphabet: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per letter. Other letters are dropped."""
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    return _letterwise(vocabulary, [])


def _letterwise(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.decoder = decoders.Fuse()  # without one, tokens are joined by spaces
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_level(lines: Sequence[str], vocab_size: int, specials: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Make a tokenizer like GPT-2's, trained on a few lines. Any text has ids, and a character may take several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(specials),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=list(specials))


def sentence_pieces(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer like SentencePiece's. ▁ stands for a space, and is put before each text; unknown characters
    become byte tokens <0x..>."""
    known = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        models.Unigram([(word, -float(place)) for place, word in enumerate(known)], unk_id=0, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
