"""Reads a corpus from files, folders and standard input, and turns it into ids."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parlay.text.tokenize import encode_all
from parlay.types import Tokenizer

FIELDS = ("text", "output", "content")
"""Fields of a JSON line that may have its text; the first that exists is used."""
STDIN = Path("-")

_PIECE = 100_000  # characters tokenised at once; longer documents are split at line ends
_BATCH = 1_000_000  # bytes tokenised together
_LONGEST_LINE = 64 * _BATCH  # bytes, in a text that is read in pieces


@dataclass(frozen=True, slots=True)
class CorpusSource:
    """One file to read, or standard input. ``named``: the user named the file itself, not a folder, so it must be
    text."""

    path: Path
    named: bool

    @property
    def size(self) -> int:
        return 0 if self.path == STDIN else self.path.stat().st_size


def sources(names: Sequence[str]) -> list[CorpusSource]:
    """List the files to read: the named files, and the files in named folders except hidden ones. Raises ValueError for
    a path that does not exist."""
    found: list[CorpusSource] = []
    for path in map(Path, names):
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file())
            hidden = {file for file in inside if any(part.startswith(".") for part in file.relative_to(path).parts)}
            found += [CorpusSource(file, False) for file in inside if file not in hidden]
        elif path == STDIN or path.exists():
            found.append(CorpusSource(path, True))
        else:
            raise ValueError(f"no file or folder {path}: name text files, .jsonl files, folders of them, or -")
    if STDIN in [source.path for source in found] and sys.stdin.isatty():
        raise ValueError("no corpus on standard input: pipe some text into it")
    return found


Document = tuple[str, int]
"""A text, and how many bytes of its source the text takes up."""


def documents(source: CorpusSource) -> Iterator[Document] | None:
    """Return the documents of a source: one per line of a .jsonl file, otherwise one per file. None if a file in a
    named folder is not text.

    Raises ValueError for a named file that is not UTF-8, and for lines without a text.
    """
    text = _content(source)
    if text is None:
        return None
    if source.path.suffix != ".jsonl":
        return iter([(text, len(text.encode()))])
    return ((text_of(line, f"{source.path}, line {at}"), len(line.encode()) + 1) for at, line in _numbered(text))


def streams(source: CorpusSource, skipped: list[CorpusSource] | None = None) -> Iterator[Iterator[str]]:
    """Yield the same documents as `documents`, each in pieces of about a million characters that end at a line's end or
    between words.

    Only a small part of a file is in memory. Each document must be read to its end before the next. Raises ValueError
    as `documents` does, and for JSON lines above 64 MB. A file in a named folder is not text if its first megabyte is
    not UTF-8; it is added to ``skipped``.
    """
    pieces = _whole_lines(source, [] if skipped is None else skipped)
    if source.path.suffix != ".jsonl":
        yield pieces
        return
    number = 0
    for piece in pieces:
        if len(piece) > _LONGEST_LINE and "\n" not in piece:
            raise ValueError(f"{source.path}, line {number + 1}: longer than {_LONGEST_LINE:,} characters")
        for line in piece.removesuffix("\n").split("\n"):
            number += 1
            if line.strip():
                yield iter([text_of(line, f"{source.path}, line {number}")])


def _whole_lines(source: CorpusSource, skipped: list[CorpusSource]) -> Iterator[str]:
    decoder, kept, place = codecs.getincrementaldecoder("utf-8-sig")(), "", 0
    try:
        with nullcontext(sys.stdin.buffer) if source.path == STDIN else source.path.open("rb") as file:
            while block := file.read(_BATCH):
                before = len(decoder.getstate()[0])
                kept += decoder.decode(block)
                place += len(block)
                parted = kept.rfind("\n") + 1
                if not parted and len(kept) > _LONGEST_LINE:
                    parted = kept.rfind(" ") + 1 or len(kept)
                if parted:
                    yield kept[:parted]
                    kept = kept[parted:]
            block, before = b"", len(decoder.getstate()[0])
            kept += decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        if not place and not source.named:
            skipped.append(source)
            return
        where = "standard input" if source.path == STDIN else source.path
        at = place - before + error.start
        raise ValueError(f"{where} is not UTF-8 (byte {at}): convert it first, say with iconv") from None
    except OSError as error:
        raise ValueError(f"can't read {source.path}: {error.strerror}") from None
    if kept:
        yield kept


def lines(source: CorpusSource) -> Iterator[tuple[int, str]]:
    """Yield the non-empty lines of a file with their numbers. Raises what `documents` raises."""
    return _numbered(_content(source) or "")


def _numbered(text: str) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())


def _content(source: CorpusSource) -> str | None:
    """Read the text of a source. None if a file in a named folder is not UTF-8."""
    try:
        return (sys.stdin.buffer.read() if source.path == STDIN else source.path.read_bytes()).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if not source.named:
            return None
        where = "standard input" if source.path == STDIN else source.path
        raise ValueError(f"{where} is not UTF-8 (byte {error.start}): convert it first, say with iconv") from None
    except OSError as error:
        raise ValueError(f"can't read {source.path}: {error.strerror}") from None


def text_of(line: str, where: str) -> str:
    """Return the text of a JSON line. If it has none, raises ValueError with a message that begins with ``where``."""
    try:
        record: Any = json.loads(line)
    except ValueError:
        raise ValueError(f"{where}: not JSON") from None
    texts = [record[field] for field in FIELDS if field in record] if isinstance(record, dict) else []
    if not texts or not isinstance(texts[0], str):
        raise ValueError(f"{where}: no object with a text under {', '.join(FIELDS)}")
    try:
        return texts[0].encode().decode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: the text is not valid Unicode") from None


def encode(
    texts: Iterator[Document], tokenizer: Tokenizer, done: Callable[[int], object] = bool
) -> Iterator[NDArray[np.uint32]]:
    """Yield the ids of each text, without special tokens. ``done`` is called with the number of bytes just finished."""
    batch: list[Document] = []
    waiting = 0
    for text, size in texts:
        batch.append((text, size))
        waiting += size
        if waiting >= _BATCH:
            yield from _encode(batch, tokenizer)
            done(waiting)
            batch, waiting = [], 0
    yield from _encode(batch, tokenizer)
    done(waiting)


def _encode(texts: Sequence[Document], tokenizer: Tokenizer) -> Iterator[NDArray[np.uint32]]:
    """Yield the ids of each text, joined from the ids of its pieces."""
    pieces = [list(cut(text)) for text, _ in texts]
    flat = [piece for parts in pieces for piece in parts]
    encoded = (ids for some in _some(flat) for ids in encode_all(tokenizer, some, special=False))
    for parts in pieces:
        yield np.array([token for _ in parts for token in next(encoded)], np.uint32)


def _some(pieces: Sequence[str]) -> Iterator[list[str]]:
    """Yield the pieces in groups, each large enough to keep all threads busy, but no larger: a call that tokenises a
    group can't be interrupted."""
    some: list[str] = []
    size = 0
    for piece in pieces:
        some.append(piece)
        size += len(piece)
        if size >= _BATCH:
            yield some
            some, size = [], 0
    yield some


def cut(text: str) -> Iterator[str]:
    """Split a text for the tokenizer, at line ends if possible."""
    start = 0
    while start < len(text):
        end = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield text[start:end]
        start = end
