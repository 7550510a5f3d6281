"""A file of the tokens that followed each pair of tokens in a corpus: made once, checked when it is opened.

A safetensors file: arrays of numbers, and format, vocabulary and checksum beside them. Opening one runs nothing.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from parlay.options import UsageError

WIDEST = 32  # followers that are kept of one pair, the most frequent ones

_FORMAT = "parlay-bigrams-1"
_ARRAYS = {"pairs": "<u8", "totals": "<u4", "starts": "<u4", "followers": "<u4", "counts": "<u4"}
_DIGEST_BYTES = 16

Columns = Mapping[str, npt.NDArray[np.unsignedinteger]]


class Bigrams:
    """Followers of each pair of tokens. Arrays: see `_ARRAYS`; pair i has followers ``starts[i]:starts[i + 1]``."""

    def __init__(self, vocab_size: int, arrays: Columns) -> None:
        self.vocab_size = vocab_size
        self.arrays = arrays
        self._pairs = array("Q", arrays["pairs"].astype(np.uint64).tobytes())

    def followers(self, first: int, second: int) -> tuple[int, dict[int, int]]:
        """How often any token followed the pair, and how often each of the most frequent ones did."""
        pair = first * self.vocab_size + second
        place = bisect_left(self._pairs, pair)
        if place == len(self._pairs) or self._pairs[place] != pair:
            return 0, {}
        begin, end = self.arrays["starts"][place : place + 2].tolist()
        tokens, counts = (self.arrays[name][begin:end].tolist() for name in ("followers", "counts"))
        return int(self.arrays["totals"][place]), dict(zip(tokens, counts, strict=True))


def build(texts: Iterable[Sequence[int]], vocab_size: int) -> Bigrams:
    """Count the tokens that follow each pair in the texts; of each pair the `WIDEST` most frequent ones are kept.

    Raises ValueError for ids outside the vocabulary.
    """
    triples = [_triples(np.asarray(text, np.int64), vocab_size) for text in texts]
    keys, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *triples]), return_counts=True)
    pairs, followers = np.divmod(keys, vocab_size)
    order = np.lexsort((followers, -counts, pairs))
    pairs, followers, counts = pairs[order], followers[order], counts[order]
    heads, begins, sizes = np.unique(pairs, return_index=True, return_counts=True)
    totals = np.add.reduceat(counts, begins) if len(heads) else counts
    kept = np.arange(len(pairs)) - np.repeat(begins, sizes) < WIDEST
    starts = np.concatenate([[0], np.cumsum(np.minimum(sizes, WIDEST))])
    columns = (heads, totals, starts, followers[kept], counts[kept])
    return Bigrams(
        vocab_size, {name: column.astype(_ARRAYS[name]) for name, column in zip(_ARRAYS, columns, strict=True)}
    )


def _triples(tokens: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.int64]:
    """Each three tokens in a row as one number, which 64 bits hold for vocabularies up to two millions."""
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError(f"a text has ids outside the vocabulary of {vocab_size}")
    return (tokens[:-2] * vocab_size + tokens[1:-1]) * vocab_size + tokens[2:]


def write(path: Path, bigrams: Bigrams) -> None:
    """Save a table that `read` opens."""
    metadata = {
        "format": _FORMAT,
        "vocab_size": str(bigrams.vocab_size),
        "checksum": _checksum(bigrams.arrays),
    }
    save_file(dict(bigrams.arrays), path, metadata)


def read(path: Path, vocab_size: int) -> Bigrams:
    """Open a table. Raises UsageError for one that is damaged, of another format, or for another vocabulary."""
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except OSError as error:
        raise UsageError(f"bigram file {path}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise UsageError(f"bigram file {path}: damaged, or no bigram file ({error})") from None
    if metadata.get("format") != _FORMAT:
        raise UsageError(f"bigram file {path}: not a file of format {_FORMAT}")
    made_for = metadata.get("vocab_size")
    if made_for != str(vocab_size):
        raise UsageError(f"bigram file {path}: made for a vocabulary of {made_for} tokens, the target has {vocab_size}")
    if metadata.get("checksum") != _checksum(arrays):
        raise UsageError(f"bigram file {path}: damaged (its checksum is wrong); build it again")
    if not _sound(arrays, vocab_size):
        raise UsageError(f"bigram file {path}: its parts do not fit together; build it again")
    return Bigrams(vocab_size, arrays)


def _sound(arrays: Columns, vocab_size: int) -> bool:
    """Whether the columns can be one table; the checksum only tells that nobody changed them by accident."""
    if {name: array.dtype.str for name, array in arrays.items()} != _ARRAYS:
        return False
    pairs, starts, followers = arrays["pairs"], arrays["starts"], arrays["followers"]
    return (
        pairs.ndim == followers.ndim == 1
        and pairs.shape == arrays["totals"].shape
        and starts.shape == (len(pairs) + 1,)
        and followers.shape == arrays["counts"].shape
        and starts[0] == 0
        and starts[-1] == len(followers)
        and bool((starts[:-1] <= starts[1:]).all())
        and int(followers.max(initial=0)) < vocab_size
    )


def _checksum(arrays: Columns) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()
