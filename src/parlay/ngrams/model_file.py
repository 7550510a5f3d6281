"""The file of an n-gram language model: a safetensors file of sorted columns, memory-mapped when it is read.

Columns for each length n: ``tokens.n``, the last ids; ``probs.n``, log10 of their probabilities; ``backoffs.n``, log10
of the back-off weights, and ``starts.n``, as in `Trie`; ``counts.n``, if kept. Quantised numbers are indexes into
``prob_table.n`` and ``backoff_table.n``. ``words``, in a model of words: the words, one a line, in UTF-8. In the
metadata, ``parlay`` is the `Header`, and ``checksum`` is the CRC-32 of all columns.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

import numpy as np

from parlay.ngrams.counting import LONGEST
from parlay.ngrams.estimating import Estimated, Numbers
from parlay.ngrams.trie import BEGIN, BLOCK, FIRST, PAD, Integers, Trie, blocks
from parlay.system.mapped_tensors import KINDS, BadTensorFile, TensorFile
from parlay.system.user_cache import saved_whole
from parlay.types import ParlayError

FORMAT = "parlay-ngrams-1"
NEVER = -99.0
"""log10 of probability 0, as SRILM and KenLM write it."""

MOST = 30.0
"""The largest log10 of a weight. It keeps the product of one weight for each length finite."""

KNESER_NEY, STUPID_BACKOFF, ARPA = "kneser-ney", "stupid-backoff", "arpa"

_NAMES = {dtype: name for name, dtype in KINDS.items() if name != "BF16"}
_LEAST = -100.5
_CODES = 256
_SAMPLE = 1 << 22
"""How many numbers of a column are sampled to make its table of codes."""


class BadNgramFile(ParlayError):
    """A file is no n-gram language model, or is damaged."""


@dataclass(frozen=True, slots=True)
class Header:
    """Describes a model. ``vocab_size`` counts the tokens of a tokenizer, or the words.

    ``tokenizer`` and ``fingerprint`` identify the tokenizer, as in a datastore; both are empty for words. ``tokens``
    and ``texts`` are the corpus's numbers of tokens and texts; 0 if unknown. ``smoothing`` is KNESER_NEY,
    STUPID_BACKOFF or ARPA, for a model that was converted from an ARPA file.
    """

    order: int
    vocab_size: int
    smoothing: str
    words: bool
    tokenizer: str = ""
    fingerprint: str = ""
    tokens: int = 0
    texts: int = 0
    pruned: str = ""
    bits: int = 32


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """The columns of a model's file. ``probs`` and ``backoffs`` are log10 of the numbers, or codes if they have a
    table."""

    header: Header
    trie: Trie
    probs: tuple[Numbers | Integers, ...]
    backoffs: tuple[Numbers | Integers, ...]
    prob_tables: tuple[Numbers | None, ...]
    backoff_tables: tuple[Numbers | None, ...]
    counts: tuple[Integers, ...] = ()
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Column:
    """A column to be written, from ``values`` a block at a time.

    ``log``: write log10 of the values. ``table``: write, for each value, the index of the nearest number in the table.
    """

    name: str
    values: Any
    dtype: str
    log: bool = False
    table: Numbers | None = None

    def blocks(self) -> Iterator[bytes]:
        for rows in blocks(len(self.values)):
            found = self.values[rows]
            if self.log:
                found = np.log10(np.maximum(found, 10**NEVER, dtype=np.float64)).astype(np.float32)
            if self.table is not None:
                found = np.searchsorted((self.table[1:] + self.table[:-1]) / 2, found)  # the nearest number's place
            yield found.astype(self.dtype).tobytes()


def write(path: Path, header: Header, model: Estimated, *, words: Sequence[str] = (), counts: bool = False) -> None:
    """Save a model atomically. ``header.bits`` is 8 or 32. Raises ParlayError if the model can't be saved."""
    small, trie = header.bits == 8, model.trie
    first = model.probs[0].copy()
    first[[PAD, BEGIN]] = 0
    columns: list[_Column] = []
    for n in range(1, trie.order + 1):
        if n > 1:
            columns.append(_Column(f"tokens.{n}", trie.tokens[n - 1], "<u2" if trie.size <= 1 << 16 else "<u4"))
        numbers = [("prob", first if n == 1 else model.probs[n - 1])]
        numbers += [("backoff", model.weights[n - 1])] if n < trie.order else []
        for name, values in numbers:
            table = _table(values) if small and n > 1 else None
            if table is not None:
                columns.append(_Column(f"{name}_table.{n}", table, "<f4"))
            columns.append(_Column(f"{name}s.{n}", values, "<f4" if table is None else "<u1", True, table))
        if n < trie.order:
            columns.append(_Column(f"starts.{n}", trie.starts[n - 1], "<u4" if trie.count(n + 1) < 1 << 32 else "<i8"))
        if counts:
            columns.append(_Column(f"counts.{n}", model.counts[n - 1], "<i8"))
    if words:
        columns.append(_Column("words", np.frombuffer("\n".join(words).encode(), np.uint8), "<u1"))
    columns.sort(key=lambda column: -np.dtype(column.dtype).itemsize)  # so that every column is aligned
    with saved_whole(path) as part, part.open("wb") as file:
        _write(file, header, columns)


def _write(file: IO[bytes], header: Header, columns: Sequence[_Column]) -> None:
    entries: dict[str, Any] = {}
    place = 0
    for column in columns:
        size = len(column.values) * np.dtype(column.dtype).itemsize
        kind = _NAMES[np.dtype(column.dtype)]
        entries[column.name] = {"dtype": kind, "shape": [len(column.values)], "data_offsets": [place, place + size]}
        place += size

    def head(checksum: int) -> bytes:
        about = {"format": FORMAT, "parlay": json.dumps(asdict(header)), "checksum": f"{checksum:08x}"}
        text = json.dumps({"__metadata__": about, **entries}).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    file.write(head(0))
    checksum = 0
    for column in columns:
        for block in column.blocks():
            checksum = zlib.crc32(block, checksum)
            file.write(block)
    file.seek(0)
    file.write(head(checksum))


def _table(values: Numbers) -> Numbers:
    """Return up to 256 numbers that stand for all logarithms: 0, and the means of bins with equally many values."""
    sample = values[:: max(1, len(values) // _SAMPLE)]
    logs = np.sort(np.log10(np.maximum(sample, 10**NEVER, dtype=np.float64)))
    different = np.unique(logs.astype(np.float32))
    if len(different) >= _CODES:
        logs = logs[logs != 0]
        different = np.unique([0.0, *(part.mean() for part in np.array_split(logs, _CODES - 1) if len(part))])
    return different.astype(np.float32)


def is_ngram_file(path: Path) -> bool:
    """Tell whether the file begins like an n-gram model. The rest of the file may still be invalid."""
    try:
        with path.open("rb") if path.is_file() else nullcontext() as file:  # a pipe could not be read again
            return file is not None and f'"format": "{FORMAT}"'.encode() in file.read(256)
    except OSError:
        return False


def read(path: Path) -> Stored:
    """Map a file that `write` made, after checking every byte. Raises BadNgramFile, with a message of one line, for any
    other file."""
    try:
        return _Reader(path, TensorFile.open(path)).stored()
    except OSError as error:
        raise BadNgramFile(f"can't read the n-gram model {path}: {error.strerror}") from None
    except BadTensorFile as error:
        arpa = path.name.endswith((".arpa", ".arpa.gz"))
        command = f"parlay ngram build {path} -o FILE" if arpa else "parlay ngram build"
        raise BadNgramFile(f"{path} {error}: make a model with `{command}`") from None


class _Reader:
    """Checks everything in the file."""

    def __init__(self, path: Path, file: TensorFile) -> None:
        """Read the metadata. Raises BadNgramFile, BadTensorFile."""
        self._path, about = path, file.metadata
        if about.get("format") != FORMAT:
            raise self._bad(f"is not an n-gram model of format {FORMAT}: make one with `parlay ngram build`")
        try:
            self.header = _header(json.loads(about["parlay"]))
            checksum = int(about["checksum"], 16)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise self._bad("has an invalid header: build it again") from None
        self._columns = {name: file.tensor(name) for name in file.names}
        if any(column.ndim != 1 for column in self._columns.values()):
            raise self._bad("has columns of several dimensions: build it again")
        with memoryview(file.content) as view:
            if zlib.crc32(view[file.begin :]) != checksum:
                raise self._bad("is damaged (its checksum does not match): copy or build it again")

    def stored(self) -> Stored:
        header, orders = self.header, range(1, self.header.order + 1)
        size = header.vocab_size + FIRST
        tokens = (np.empty(0, np.uint16), *(self._take(f"tokens.{n}") for n in orders[1:]))
        starts = tuple(self._take(f"starts.{n}") for n in orders[:-1])
        trie = Trie(size, tokens, starts)
        try:
            words = tuple(bytes(self._take("words")).decode().split("\n")) if header.words else ()
        except UnicodeDecodeError:
            raise self._bad("has words that are not UTF-8: build it again") from None
        probs = tuple(self._take(f"probs.{n}") for n in orders)
        backoffs = tuple(self._take(f"backoffs.{n}") for n in orders[:-1])
        tables = [tuple(self._columns.get(f"{name}_table.{n}") for n in orders) for name in ("prob", "backoff")]
        counts = tuple(self._columns[f"counts.{n}"] for n in orders if f"counts.{n}" in self._columns)
        stored = Stored(header, trie, probs, backoffs, tables[0], tables[1], counts, words)
        if not _fits(stored):
            raise self._bad("has parts that do not fit together: build it again")
        return stored

    def _take(self, name: str) -> Any:
        if name not in self._columns:
            raise self._bad(f"lacks the column {name}: build it again")
        return self._columns[name]

    def _bad(self, what: str) -> BadNgramFile:
        return BadNgramFile(f"{self._path} {what}")


def _header(values: Mapping[str, Any]) -> Header:
    """Make the header. Raises ValueError or TypeError for invalid values."""
    kinds = {field.name: field.type for field in fields(Header)}
    if any(type(value).__name__ != kinds.get(name) for name, value in values.items()):
        raise ValueError
    header = Header(**values)
    if not 1 <= header.order <= LONGEST or not 0 < header.vocab_size < 2**32 - FIRST:
        raise ValueError
    return header


def _fits(stored: Stored) -> bool:
    """Tell whether all indexes in the columns are within the columns that they point to."""
    trie = stored.trie
    if any(each.dtype.kind != "u" for each in trie.tokens):
        return False
    if any(each.dtype.kind not in "iu" for each in (*trie.starts, *stored.counts)):
        return False
    lengths = [trie.count(n) for n in range(1, trie.order + 1)]
    if [len(each) for each in stored.probs] != lengths or [len(each) for each in stored.backoffs] != lengths[:-1]:
        return False
    if stored.counts and [len(each) for each in stored.counts] != lengths:
        return False
    if stored.header.words and len(stored.words) != stored.header.vocab_size:
        return False
    numbers = [*zip(stored.probs, stored.prob_tables, strict=True)]
    numbers += [*zip(stored.backoffs, stored.backoff_tables, strict=False)]
    return all(map(_sound_numbers, *zip(*numbers, strict=True))) and all(
        len(starts) == below + 1
        and int(starts[0]) == 0
        and int(starts[-1]) == above == len(trie.tokens[n])
        and all(bool((starts[rows][1:] >= starts[rows][:-1]).all()) for rows in _overlapping(len(starts)))
        and all(int(trie.tokens[n][rows].max()) < trie.size for rows in blocks(above))
        for n, (starts, below, above) in enumerate(zip(trie.starts, lengths, lengths[1:], strict=False), 1)
    )


def _sound_numbers(values: Numbers | Integers, table: Numbers | None) -> bool:
    """Tell whether the values are valid codes of the table or, without a table, valid logarithms."""
    if not len(values):
        return True
    if table is None:
        return values.dtype.kind == "f" and all(map(_within, (values[rows] for rows in blocks(len(values)))))
    most = max(int(values[rows].max()) for rows in blocks(len(values)))
    return values.dtype == np.uint8 and table.dtype.kind == "f" and most < len(table) and _within(table)


def _within(logs: Numbers) -> bool:
    return bool(((logs >= _LEAST) & (logs <= MOST)).all())


def _overlapping(length: int) -> Iterator[slice]:
    """Yield slices as `blocks` does, each extended by the first row of the next."""
    return (slice(start, start + BLOCK + 1) for start in range(0, length, BLOCK))
