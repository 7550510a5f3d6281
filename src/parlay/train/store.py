"""Tokens on disk: one memory-mapped file of uint16 per kind, with document offsets; and batches drawn from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from parlay.train.chat import END_OF_TEXT

Ids = npt.NDArray[np.int64]
IGNORE = -100
CHUNK = 2000
# Kinds whose documents are longer than a row: a row is a window that may start anywhere.
LONG_KINDS = frozenset({"prose", "technical", "speech", "code"})
REPEATED_KINDS = ("prose", "code", "calls", "speech", "technical", "maths", "tasks")


@dataclass(frozen=True, slots=True)
class Stream:
    """Documents end to end: ``tokens[offsets[i]:offsets[i + 1]]`` is document i."""

    tokens: npt.NDArray[np.uint16]
    offsets: Ids

    @classmethod
    def load(cls, folder: Path, name: str) -> Stream:
        """Maps a stream written by `write_stream`."""
        tokens = np.load(folder / f"{name}.tokens.npy", mmap_mode="r")
        return cls(tokens, np.load(folder / f"{name}.offsets.npy"))

    def document(self, index: int) -> Ids:
        """Tokens of one document."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]].astype(np.int64)

    def window(self, start: int, length: int) -> Ids:
        """``length`` tokens from ``start``."""
        return self.tokens[start : start + length].astype(np.int64)

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return len(self.offsets) - 1


def make_stream(texts: list[str], tokenizer: Tokenizer) -> Stream:
    """Tokenises ``texts``, each closed by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces: list[npt.NDArray[np.uint16]] = []
    for start in range(0, len(texts), CHUNK):
        encoded = tokenizer.encode_batch_fast(texts[start : start + CHUNK], add_special_tokens=False)
        pieces.extend(np.array([*encoding.ids, end], dtype=np.uint16) for encoding in encoded)
    return Stream(np.concatenate(pieces), np.cumsum([0, *map(len, pieces)]))


def write_stream(folder: Path, name: str, texts: list[str], tokenizer: Tokenizer) -> int:
    """Tokenises ``texts`` onto disk; returns the number of tokens."""
    stream = make_stream(texts, tokenizer)
    np.save(folder / f"{name}.offsets.npy", stream.offsets)
    np.save(folder / f"{name}.tokens.npy", stream.tokens)
    return len(stream.tokens)


@dataclass(frozen=True, slots=True)
class Batches:
    """Rows of tokens by kind; a batch is a pure function of (seed, step), so a resumed run sees the same ones.

    Every row begins with the token ``start``, as every text does that the model will see.
    """

    streams: dict[str, Stream]
    vocab_size: int
    seed: int
    start: int = 0

    def draw(self, step: int, rows: int, length: int, mix: dict[str, float]) -> tuple[Ids, Ids]:
        """(input ids, labels), each ``[rows, length]``; labels are already shifted."""
        rng = np.random.default_rng((self.seed, step))
        kinds = stratified(rng, list(mix), np.array(list(mix.values())), rows)
        drawn = [self.row(rng, kind, length) for kind in kinds]
        ids = np.stack([np.concatenate([[self.start], row[:-1]]) for row, _ in drawn])
        labels = np.stack([label for _, label in drawn])
        return ids, labels

    def row(self, rng: np.random.Generator, kind: str, length: int) -> tuple[Ids, Ids]:
        """One row and its labels."""
        if kind == "noise":
            return self.noise(rng, length)
        if kind == "repeat":
            row = self.repeated(rng, length)
        elif kind in LONG_KINDS:
            row = self.window(rng, kind, length)
        else:
            row = self.packed(rng, kind, length)
        return row, row

    def window(self, rng: np.random.Generator, kind: str, length: int) -> Ids:
        """A window at a random place of a long kind."""
        stream = self.streams[kind]
        return stream.window(int(rng.integers(len(stream.tokens) - length)), length)

    def packed(self, rng: np.random.Generator, kind: str, length: int) -> Ids:
        """Whole documents from the first token on; only the last may be cut."""
        stream, pieces, room = self.streams[kind], [], length
        while room > 0:
            candidates = [stream.document(int(index)) for index in rng.integers(stream.documents, size=4)]
            fitting = [document for document in candidates if len(document) <= room]
            piece = max(fitting, key=len) if fitting else candidates[0][:room]
            pieces.append(piece)
            room -= len(piece)
        return np.concatenate(pieces)

    def repeated(self, rng: np.random.Generator, length: int) -> Ids:
        """Running text in which earlier stretches come again, word for word."""
        kinds = [k for k in REPEATED_KINDS if k in self.streams and len(self.streams[k].tokens) > length]
        kind = kinds[int(rng.integers(len(kinds)))]
        text = self.window(rng, kind, length)
        row = np.empty(0, dtype=np.int64)
        while len(row) < length:
            fresh = int(rng.integers(20, 120))
            row, text = np.concatenate([row, text[:fresh]]), text[fresh:]
            span = min(int(rng.integers(20, 200)), len(row))
            start = int(rng.integers(len(row) - span + 1))
            row = np.concatenate([row, row[start : start + span]])
        return row[:length]

    def noise(self, rng: np.random.Generator, length: int) -> tuple[Ids, Ids]:
        """Random tokens, repeated; the first showing of each stretch is no target, as nothing predicts it.

        Half of the rows are one short cycle: few tokens, so that attending anywhere helps a little and attending
        to what followed the same token helps fully. That slope is what lets induction heads form early.
        """
        pieces: list[Ids] = []
        labels: list[Ids] = []
        shortest, cycle = (3, True) if rng.random() < 0.5 else (12, False)
        while sum(map(len, pieces)) < length:
            size = int(np.exp(rng.uniform(np.log(shortest), np.log(220))))
            piece = rng.integers(5, self.vocab_size, size=size)
            turns = -(-length // size) if cycle else int(rng.integers(2, 5))
            pieces.extend([piece] * turns)
            labels.extend([np.full(size, IGNORE), *[piece] * (turns - 1)])
        return np.concatenate(pieces)[:length], np.concatenate(labels)[:length]


def stratified(rng: np.random.Generator, kinds: list[str], weights: npt.NDArray[np.float64], count: int) -> list[str]:
    """``count`` kinds, each within one of its share: evenly spaced points on the cumulated weights."""
    order = rng.permutation(len(kinds))  # neighbours on the line must not always be the same ones
    edges = np.cumsum(weights[order] / weights.sum())
    points = (np.arange(count) + rng.random()) / count
    return [kinds[order[min(int(np.searchsorted(edges, point)), len(kinds) - 1)]] for point in points]
