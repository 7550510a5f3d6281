"""A datastore: the tokens of a corpus and their suffix array, in one file that is memory-mapped, never loaded.

Layout, little endian: a preamble of 32 bytes (`_PREAMBLE`: magic, version, CRC-32 of everything after it, length of the
header, size of the file); a JSON header, padded with spaces; the tokens, u16 or u32; the suffix array, u32 or u64. Each
array begins at a multiple of 8. Each document is followed by a border, which is the first id outside the vocabulary, so
that no match crosses documents. Suffixes that begin with a border are left out.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import zlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from parlay.drafters.stores.suffix_array import Integers, suffix_array
from parlay.options import UsageError
from parlay.types import ParlayError, Tokenizer

VERSION = 1
MAGIC = b"PARLAYDS"
_PREAMBLE = struct.Struct("<8sIIQQ")
_CHECKED_FROM = 16  # offset of the data after the checksum
_ALIGNMENT = 8
_TOGETHER = 1 << 24
"""How many tokens are checked at a time."""


class BadDatastore(ParlayError):
    """The file is not a datastore, or is damaged."""


@dataclass(frozen=True, slots=True)
class DatastoreHeader:
    """Describes a datastore. ``fingerprint`` identifies the tokenizer of its ids, and ``tokenizer`` names it.

    Both are empty if the ids have another origin. ``tokens`` counts the ids stored, including one border per document.
    """

    vocab_size: int
    tokens: int
    documents: int
    tokenizer: str = ""
    fingerprint: str = ""

    @property
    def suffixes(self) -> int:
        return self.tokens - self.documents

    @property
    def token_type(self) -> np.dtype[Any]:
        """The smallest type that can hold every id and the border."""
        return np.dtype("<u2" if self.vocab_size <= 0xFFFF else "<u4")

    @property
    def suffix_type(self) -> np.dtype[Any]:
        return np.dtype("<u4" if self.tokens <= 2**32 else "<u8")

    def offsets(self, header_bytes: int) -> tuple[int, int, int]:
        """Offsets of the tokens, of the suffix array, and of the end of the file."""
        tokens_at = _PREAMBLE.size + header_bytes
        suffixes_at = _aligned(tokens_at + self.tokens * self.token_type.itemsize)
        return tokens_at, suffixes_at, suffixes_at + self.suffixes * self.suffix_type.itemsize


class Datastore:
    """Finds runs of tokens in a corpus. Arrays are read-only and may be mapped from a file."""

    def __init__(self, header: DatastoreHeader, tokens: Integers, suffixes: Integers, checksum: int = 0) -> None:
        """``checksum``: that of its file, if it has one."""
        self.header, self.checksum = header, checksum
        self.tokens = tokens
        self.suffixes = suffixes
        self._token_view = tokens.data
        self._suffix_view = suffixes.data

    @classmethod
    def build(
        cls,
        documents: Sequence[Integers],
        vocab_size: int,
        *,
        tokenizer: str = "",
        fingerprint: str = "",
        sorted_more: Callable[[int], object] = bool,
    ) -> Self:
        """Build a datastore from documents of ids. ``sorted_more`` is called with how many more suffixes are sorted.

        Raises ValueError for ids outside the vocabulary, and for an empty corpus.
        """
        documents = [document for document in documents if len(document)]
        if not documents:
            raise ValueError("the corpus holds no text")
        if min(int(ids.min()) for ids in documents) < 0 or max(int(ids.max()) for ids in documents) >= vocab_size:
            raise ValueError(f"the corpus holds token ids outside the vocabulary of {vocab_size}")
        total = sum(map(len, documents)) + len(documents)
        header = DatastoreHeader(vocab_size, total, len(documents), tokenizer, fingerprint)
        border = np.array([vocab_size], header.token_type)
        tokens = np.concatenate([part.astype(header.token_type) for ids in documents for part in (ids, border)])
        suffixes = suffix_array(tokens, sorted_more)[: header.suffixes]  # borders sort last
        return cls(header, tokens, suffixes.astype(header.suffix_type))

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map a file that `write` made, after checking every byte.

        Raises BadDatastore with one line if it is invalid.
        """
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except OSError as error:
            raise BadDatastore(f"can't read the datastore {path}: {error.strerror}") from error
        header, header_bytes = _read_header(path, content)
        tokens_at, suffixes_at, _ = header.offsets(header_bytes)
        tokens = np.frombuffer(content, header.token_type, header.tokens, tokens_at)
        suffixes = np.frombuffer(content, header.suffix_type, header.suffixes, suffixes_at)
        if not _sound(header, tokens, suffixes):
            raise BadDatastore(f"{path} contains invalid texts or places: build it again")
        return cls(header, tokens, suffixes, checksum=_PREAMBLE.unpack_from(content)[2])

    def write(self, path: Path) -> None:
        """Write the whole file or nothing. An existing file is replaced at the end. Raises OSError."""
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        pieces = self._pieces()
        checksum = 0
        for piece in pieces:
            checksum = zlib.crc32(piece, checksum)
        try:
            with part.open("xb") as file:
                file.write(_PREAMBLE.pack(MAGIC, VERSION, checksum, 0, 0)[:_CHECKED_FROM])
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def _pieces(self) -> list[bytes | memoryview]:
        """All data after the checksum."""
        header = json.dumps(asdict(self.header)).encode()
        header = header.ljust(_aligned(_PREAMBLE.size + len(header)) - _PREAMBLE.size)
        tokens_at, suffixes_at, size = self.header.offsets(len(header))
        preamble = _PREAMBLE.pack(MAGIC, VERSION, 0, len(header), size)[_CHECKED_FROM:]
        padding = bytes(suffixes_at - tokens_at - self.tokens.nbytes)
        return [preamble, header, self.tokens.data.cast("B"), padding, self.suffixes.data.cast("B")]

    def longest(self, tokens: Sequence[int], shortest: int) -> tuple[int, int, int]:
        """The longest suffix of ``tokens`` that occurs here with a next token: its length, and the range of suffixes.

        The length is 0 if not even the last ``shortest`` tokens occur. If a suffix occurs, all shorter ones do, so a
        binary search finds it.
        """
        low, high = shortest - 1, len(tokens)
        found = 0, 0, 0
        while low < high:
            length = (low + high + 1) // 2
            start, end = self.find(tokens[-length:])
            if start < end:
                low, found = length, (length, start, end)
            else:
                high = length - 1
        return found

    def find(self, query: Sequence[int]) -> tuple[int, int]:
        """The range of suffixes that begin with ``query`` and continue in the same document; may be empty."""
        tokens, suffixes, border = self._token_view, self._suffix_view, self.header.vocab_size
        wanted, length = list(query), len(query)

        def beginning(suffix: int) -> list[int]:
            return tokens[suffix : suffix + length].tolist()

        start = bisect_left(suffixes, wanted, key=beginning)
        if start == len(suffixes) or beginning(suffixes[start]) != wanted:
            return start, start
        length += 1  # suffixes that end with the query sort last, because a border is larger than any id
        return start, bisect_left(suffixes, [*wanted, border], start, key=beginning)


class Whose(Protocol):
    """Describes the tokenizer of a file of token ids; see `DatastoreHeader`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def tokenizer(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...


def check_tokens(reader: str, name: str, whose: Whose, vocab_size: int, tokens: str) -> None:
    """Raises UsageError for a file with tokens other than the target's, whose fingerprint is ``tokens``."""
    if whose.vocab_size > vocab_size:
        raise UsageError(
            f"{reader}: {name} has a vocabulary of {whose.vocab_size} tokens and the target one of "
            f"{vocab_size}: build it again with the target's tokenizer"
        )
    if tokens and whose.fingerprint not in ("", tokens):
        raise UsageError(
            f"{reader}: {name} was built with another tokenizer ({whose.tokenizer or 'unknown'}) than the "
            "target's: build it again with the target's"
        )


def fingerprint(tokenizer: Tokenizer) -> str:
    """A digest of the tokenizer's vocabulary; equal for tokenizers whose ids mean the same."""
    digest = hashlib.sha256()
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        digest.update(f"{number}\t{token}\n".encode())
    return digest.hexdigest()[:32]


def vocabulary(tokenizer: Tokenizer) -> int:
    """The largest id of the tokenizer plus one."""
    return 1 + max(int(number) for number in tokenizer.get_vocab().values())


def _read_header(path: Path, content: mmap.mmap | bytes) -> tuple[DatastoreHeader, int]:
    """The header and its length, after all checks that must precede reading the rest."""
    if len(content) < _PREAMBLE.size or content[: len(MAGIC)] != MAGIC:
        raise BadDatastore(f"{path} is not a datastore: make one with `parlay datastore build`")
    _, version, checksum, header_bytes, size = _PREAMBLE.unpack_from(content)
    if version != VERSION:
        raise BadDatastore(f"{path} is a datastore of version {version}, not {VERSION}: build it again")
    with memoryview(content) as view:
        intact = zlib.crc32(view[_CHECKED_FROM:]) == checksum
    if size != len(content) or not intact:
        what = "cut short" if size > len(content) else "damaged (its checksum does not match)"
        raise BadDatastore(f"{path} is {what}: copy or build it again")
    try:
        header = _parse(content[_PREAMBLE.size : _PREAMBLE.size + header_bytes])
    except (ValueError, RecursionError):
        raise BadDatastore(f"{path} has an invalid header: build it again") from None
    if header.offsets(header_bytes)[-1] != size:
        raise BadDatastore(f"{path} has a header that does not fit its size: build it again")
    return header, header_bytes


def _parse(text: bytes) -> DatastoreHeader:
    """The header. Raises ValueError if it is not valid."""
    values = json.loads(text)
    names = {field.name: field.type for field in fields(DatastoreHeader)}
    if not isinstance(values, dict) or values.keys() != names.keys():
        raise ValueError
    if any(type(values[name]).__name__ != kind for name, kind in names.items()):
        raise ValueError
    header = DatastoreHeader(**values)
    if not 0 < header.documents < header.tokens or not 0 < header.vocab_size < 2**32:
        raise ValueError
    return header


def _sound(header: DatastoreHeader, tokens: Integers, suffixes: Integers) -> bool:
    """Whether all tokens are in the vocabulary, each document ends with a border, and all suffixes are in range."""
    parts = (tokens[start : start + _TOGETHER] for start in range(0, len(tokens), _TOGETHER))
    borders = sum(int((part == header.vocab_size).sum()) for part in parts)
    inside = int(tokens.max()) == tokens[-1] == header.vocab_size and int(suffixes.max(initial=0)) < len(tokens)
    return inside and borders == header.documents


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
