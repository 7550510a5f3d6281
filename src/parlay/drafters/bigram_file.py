"""A file of what followed each pair of tokens in a corpus: made once, checked when it is opened.

A line of JSON (format, vocabulary, sizes, checksum), then arrays in little-endian order. It holds numbers only, so
opening one runs nothing.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from parlay.drafters.entries import UsageError

WIDEST = 32  # followers that are kept of one pair, the most frequent ones

_FORMAT = "parlay-bigrams-1"
_ARRAYS = {"pairs": "<u8", "totals": "<u4", "starts": "<u4", "followers": "<u4", "counts": "<u4"}
_DIGEST_BYTES = 16


class Bigrams:
    """What followed each pair of tokens. Arrays: see `_ARRAYS`; pair i has followers ``starts[i]:starts[i + 1]``."""

    def __init__(self, vocab_size: int, arrays: dict[str, npt.NDArray[np.unsignedinteger]]) -> None:
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
    body = b"".join(bigrams.arrays[name].tobytes() for name in _ARRAYS)
    header = {
        "format": _FORMAT,
        "vocab_size": bigrams.vocab_size,
        "pairs": len(bigrams.arrays["pairs"]),
        "followers": len(bigrams.arrays["followers"]),
        "checksum": _checksum(body),
    }
    path.write_bytes(json.dumps(header).encode() + b"\n" + body)


def read(path: Path, vocab_size: int) -> Bigrams:
    """Open a table. Raises UsageError for one that is damaged, of another format, or for another vocabulary."""
    try:
        head, _, body = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise UsageError(f"bigram file {path}: {error.strerror or error}") from None
    header = _header(path, head)
    if header["vocab_size"] != vocab_size:
        raise UsageError(
            f"bigram file {path}: made for a vocabulary of {header['vocab_size']} tokens, the target has {vocab_size}"
        )
    if header["checksum"] != _checksum(body):
        raise UsageError(f"bigram file {path}: damaged (its checksum is wrong); build it again")
    return Bigrams(vocab_size, _arrays(path, header, body))


def _header(path: Path, head: bytes) -> dict[str, int | str]:
    try:
        header = json.loads(head)
    except ValueError:
        header = None
    keys = {"format", "vocab_size", "pairs", "followers", "checksum"}
    if not isinstance(header, dict) or header.get("format") != _FORMAT or header.keys() != keys:
        raise UsageError(f"bigram file {path}: not a file of format {_FORMAT}")
    return header


def _arrays(path: Path, header: dict[str, int | str], body: bytes) -> dict[str, npt.NDArray[np.unsignedinteger]]:
    """The columns, if they fit together; the checksum only tells that nobody changed them by accident."""
    pairs, followers = int(header["pairs"]), int(header["followers"])
    lengths = {"pairs": pairs, "totals": pairs, "starts": pairs + 1, "followers": followers, "counts": followers}
    arrays: dict[str, npt.NDArray[np.unsignedinteger]] = {}
    offset = 0
    try:
        for name, length in lengths.items():
            arrays[name] = np.frombuffer(body, _ARRAYS[name], length, offset)
            offset += arrays[name].nbytes
    except ValueError:
        offset = -1
    starts, tokens = arrays.get("starts"), arrays.get("followers")
    sound = (
        offset == len(body)
        and starts is not None and tokens is not None
        and starts[0] == 0 and starts[-1] == followers and bool((starts[:-1] <= starts[1:]).all())
        and (followers == 0 or tokens.max() < int(header["vocab_size"]))
    )  # fmt: skip
    if not sound:
        raise UsageError(f"bigram file {path}: its parts do not fit together; build it again")
    return arrays


def _checksum(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).hexdigest()
