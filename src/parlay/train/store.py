"""Tokens on disk, one memory-mapped file of uint16 for each part of a corpus; and batches drawn from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from parlay.train.tokenizer import END_OF_TEXT

Ids = npt.NDArray[np.int64]
CHUNK = 2000


@dataclass(frozen=True, slots=True)
class TokenStream:
    """Documents end to end, each closed by the end-of-text token."""

    tokens: npt.NDArray[np.uint16]

    @classmethod
    def load(cls, folder: Path, name: str) -> TokenStream:
        """Maps a stream written by `write_stream`."""
        return cls(np.load(folder / f"{name}.tokens.npy", mmap_mode="r"))

    def window(self, start: int, length: int) -> Ids:
        """``length`` tokens from ``start``."""
        return self.tokens[start : start + length].astype(np.int64)


def make_stream(texts: Sequence[str], tokenizer: Tokenizer) -> TokenStream:
    """Tokenises ``texts``."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces = [np.empty(0, dtype=np.uint16)]
    for start in range(0, len(texts), CHUNK):
        encoded = tokenizer.encode_batch_fast(texts[start : start + CHUNK], add_special_tokens=False)
        pieces.extend(np.array([*encoding.ids, end], dtype=np.uint16) for encoding in encoded)
    return TokenStream(np.concatenate(pieces))


def write_stream(folder: Path, name: str, texts: Sequence[str], tokenizer: Tokenizer) -> int:
    """Tokenises ``texts`` onto disk; returns the number of tokens."""
    stream = make_stream(texts, tokenizer)
    np.save(folder / f"{name}.tokens.npy", stream.tokens)
    return len(stream.tokens)


@dataclass(frozen=True, slots=True)
class Batches:
    """Rows of tokens; a batch is a pure function of (seed, step), so a resumed run sees the same ones."""

    stream: TokenStream
    seed: int

    def draw(self, step: int, rows: int, length: int) -> tuple[Ids, Ids]:
        """(input ids, labels), each ``[rows, length]``: windows at random places, labels one token further.

        The stream must have more than ``length`` tokens.
        """
        rng = np.random.default_rng((self.seed, step))
        starts = rng.integers(len(self.stream.tokens) - length, size=rows).tolist()
        windows = np.stack([self.stream.window(start, length + 1) for start in starts])
        return windows[:, :-1], windows[:, 1:]
