"""Data of language models trained from scratch: text files, tokenizer, tokens on disk, and batches drawn from them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from parlay.text import corpus

Ids = npt.NDArray[np.int64]
CHUNK = 2000
"""Texts that are tokenised at once."""


@dataclass(frozen=True, slots=True)
class TokenStream:
    """Documents one after another in one array, each followed by the end-of-text token."""

    tokens: npt.NDArray[np.uint16]

    @classmethod
    def load(cls, folder: Path, name: str) -> TokenStream:
        """Open a stream written by `write_stream`, memory-mapped."""
        return cls(np.load(folder / f"{name}.tokens.npy", mmap_mode="r"))

    def window(self, start: int, length: int) -> Ids:
        """Return ``length`` tokens from place ``start`` on, int64."""
        return self.tokens[start : start + length].astype(np.int64)


def make_stream(texts: Sequence[str], tokenizer: Tokenizer) -> TokenStream:
    """Tokenise ``texts`` into one stream."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces = [np.empty(0, dtype=np.uint16)]
    for start in range(0, len(texts), CHUNK):
        encoded = tokenizer.encode_batch_fast(texts[start : start + CHUNK], add_special_tokens=False)
        pieces.extend(np.array([*encoding.ids, end], dtype=np.uint16) for encoding in encoded)
    return TokenStream(np.concatenate(pieces))


def write_stream(folder: Path, name: str, texts: Sequence[str], tokenizer: Tokenizer) -> int:
    """Tokenise ``texts``, write them to ``folder`` under ``name``, and return the number of tokens."""
    stream = make_stream(texts, tokenizer)
    np.save(folder / f"{name}.tokens.npy", stream.tokens)
    return len(stream.tokens)


@dataclass(frozen=True, slots=True)
class Batches:
    """Draws batches of random windows. A batch depends only on (seed, step), so a resumed run sees the same ones."""

    stream: TokenStream
    seed: int

    def draw(self, step: int, rows: int, length: int) -> tuple[Ids, Ids]:
        """Return input ids and labels ``[rows, length]``: windows at random places; labels are the ids one token later.

        The stream must have more than ``length`` tokens.
        """
        rng = np.random.default_rng((self.seed, step))
        starts = rng.integers(len(self.stream.tokens) - length, size=rows).tolist()
        windows = np.stack([self.stream.window(start, length + 1) for start in starts])
        return windows[:, :-1], windows[:, 1:]


END_OF_TEXT = "<|endoftext|>"
# Pieces: a word with its leading space; a single digit, so that the model copies and adds numbers digit by digit;
# a run of punctuation; a run of white space, without the last blank, which belongs to the following word.
SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE tokenizer from ``texts``; id 0 is the end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def wrap_tokenizer(tokenizer: Tokenizer, context: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer as a ``transformers`` one, which begins each text with the end-of-text token.

    In the training stream, too, each document follows an end-of-text token.
    """
    start = [(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", pair=f"{END_OF_TEXT} $A $B", special_tokens=start
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


HELDOUT_ONE_IN = 20
"""One piece of text in this many is held out."""
SAMPLE_CHARS = 16_000_000
"""About how many characters the tokenizer is trained on."""
PIECE_CHARS = 30_000
"""Longest piece of a document. In a small corpus pieces are shorter, so that even a single book has a held-out part."""
TRAINING, HELDOUT = "training", "heldout"
READY = "ready.json"
"""The file that `prepare` writes last, with the options and hashes of the data."""


def prepare(data: Path, work: Path, *, vocab_size: int, resume: bool = False) -> None:
    """Write tokenizer and token streams to ``work``, unless an earlier call did so for the same arguments and files.

    With ``resume``, an existing run's tokens are kept even if the files in ``data`` have changed.

    Raises ValueError if ``data`` is missing or holds no text, or if ``resume`` comes with another ``data`` or
    ``vocab_size`` than the run began with.
    """
    wanted = {"data": str(data), "vocab_size": vocab_size}
    ready = work / READY
    known = json.loads(ready.read_text()) if ready.exists() else {}
    if resume and known:
        if known["options"] != wanted:
            raise ValueError(
                f"{work} is from a run with {known['options']}, not {wanted}: --resume needs the same options"
            )
        return
    sources = corpus.sources([str(data)])
    hashes = {os.path.relpath(each.path, data): hashlib.sha256(each.path.read_bytes()).hexdigest() for each in sources}
    if known == {**known, "options": wanted, "files": hashes}:
        return
    texts = _pieces([text for source in sources for text, _ in corpus.documents(source) or ()])
    if len(texts) <= 1:
        raise ValueError(f"no text in {data}: name a folder of text files or .jsonl files")
    heldout, training = texts[::HELDOUT_ONE_IN], [text for at, text in enumerate(texts) if at % HELDOUT_ONE_IN]
    work.mkdir(parents=True, exist_ok=True)
    ready.unlink(missing_ok=True)  # so that a killed call is not taken for a complete one
    every = -(-sum(map(len, training)) // SAMPLE_CHARS) or 1
    tokenizer = train_tokenizer(
        [paragraph for text in training[::every] for paragraph in text.split("\n\n")], vocab_size
    )
    tokenizer.save(str(work / "tokenizer.json"))
    parts = {TRAINING: training, HELDOUT: heldout}
    counts = {name: write_stream(work, name, part, tokenizer) for name, part in parts.items()}
    ready.write_text(json.dumps({"options": wanted, "tokens": counts, "files": hashes}, indent=1))


def load_stream(work: Path, name: str, longest: int) -> TokenStream:
    """Open a stream that `prepare` wrote. Raises ValueError if it has too few tokens for rows of ``longest``."""
    stream = TokenStream.load(work, name)
    if len(stream.tokens) <= longest:
        raise ValueError(f"only {len(stream.tokens)} tokens of {name} text: give more text, or a shorter --context")
    return stream


def _pieces(documents: list[str]) -> list[str]:
    """Cut documents into pieces, see `PIECE_CHARS`, and replace end-of-text tokens inside them by line ends."""
    size = min(PIECE_CHARS, max(1, sum(map(len, documents)) // HELDOUT_ONE_IN))
    starts = [(text, at) for text in documents for at in range(0, len(text), size)]
    return [text[at : at + size].replace(END_OF_TEXT, "\n") for text, at in starts]
