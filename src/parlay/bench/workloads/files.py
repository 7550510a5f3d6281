"""Reads workload files: JSON lines or one JSON array, plain or compressed with zstd or gzip.

Records are only parsed as JSON; nothing in them is executed. Every error is one line with the file and the line in it.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parlay.bench.workloads.shapes import Item, Message, shape_of
from parlay.types import ParlayError

COMPRESSED = (".zst", ".gz")
_MOST_UNPACKED = 1 << 30
"""Limit on the bytes of an unpacked file. Without it, a small compressed file could fill the memory."""


def read_prompts(path: Path, broken: list[str] | None = None) -> Iterator[Item]:
    """Read the prompts of a file: JSON as `read` takes it, or a text with a prompt on each line.

    A file is JSON if its name ends so or its first line is a JSON object. Every command that takes a file of prompts
    uses this function. Raises ValueError as `read` does, and for an empty file.
    """
    found = read(path, broken) if _holds_json(path) else _lines(path)
    first = next(found, None)
    if first is None:
        raise ValueError(f"{path} holds no prompts: give one on each line, or as JSON lines with prompt or messages")
    yield first
    yield from found


def _holds_json(path: Path) -> bool:
    if path.name.endswith((".jsonl", ".json", *COMPRESSED)):
        return True
    try:
        return isinstance(json.loads(read_text(path).lstrip().partition("\n")[0]), dict)
    except (ValueError, RecursionError):
        return False


def _lines(path: Path) -> Iterator[Item]:
    for number, line in enumerate(read_text(path).split("\n")):  # splitlines would also split at rare characters
        if line.strip():
            yield Item(id=str(number), messages=(Message("user", line.strip()),))


def stem(path: Path) -> str:
    """Return the file's name without the suffixes of its format."""
    name = path.name
    for ending in (*COMPRESSED, ".jsonl", ".json"):
        name = name.removesuffix(ending) or name
    return name


def read(path: Path, broken: list[str] | None = None) -> Iterator[Item]:
    """Read the items of a file. All records must have the same shape as the first one.

    If ``broken`` is given, wrong records are left out, and an error message for each is appended to it. Raises
    ValueError for a file that can't be read and, without ``broken``, for a record with an unknown or another shape.
    Raises ParlayError if a compressed file needs a library that is not installed.
    """
    shape, texts = None, False
    for number, (where, record) in enumerate(records(path, broken)):
        try:
            texts = texts or (not number and isinstance(record, str))
            record = {"messages": [{"role": "user", "content": record}]} if texts else record
            if not isinstance(record, dict):
                raise ValueError("not an object")
            shape = shape or shape_of(record)
            item = shape.item(record, str(number))
        except KeyError as error:
            _refuse(f"{path}, {where}: {error} is missing", broken)
        except (TypeError, ValueError) as error:
            _refuse(f"{path}, {where}: {error}", broken)
        else:
            yield item


def _refuse(fault: str, broken: list[str] | None) -> None:
    if broken is None:
        raise ValueError(fault) from None
    broken.append(fault)


def records(path: Path, broken: list[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the place of each record in the file, and the record.

    With ``broken``, lines that are not JSON are left out, as in `read`.
    """
    text = read_text(path)
    if text.lstrip().startswith("["):
        yield from ((f"record {number}", record) for number, record in enumerate(_parsed(path, text, 1), start=1))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                record = _parsed(path, line, number)
            except ValueError as error:
                _refuse(str(error), broken)
            else:
                yield f"line {number}", record


def _parsed(path: Path, text: str, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{path}, line {first_line + error.lineno - 1}"
        raise ValueError(f"{place}: not JSON ({error.msg}: column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # numbers with thousands of digits, or lists nested too deep
        raise ValueError(f"{path}, line {first_line}: not JSON ({error})") from None


def read_text(path: Path) -> str:
    """Return the text of a file, unpacked. Raises what `read` raises for a file that can't be read."""
    try:
        content = _content(path)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"can't read {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: not UTF-8") from None


def _content(path: Path) -> bytes:
    if path.suffix == ".gz":
        with gzip.open(path) as stream:
            return _unpacked(path, stream)
    return _unpack_zstd(path) if path.suffix == ".zst" else path.read_bytes()


def _unpacked(path: Path, stream: Any) -> bytes:
    """Read a compressed stream, whose length is not known before. Raises ValueError if it is too long."""
    content: bytes = stream.read(_MOST_UNPACKED + 1)
    if len(content) > _MOST_UNPACKED:
        raise ValueError(f"{path} holds more than {_MOST_UNPACKED:,} bytes of text: unpack it first")
    return content


def _unpack_zstd(path: Path) -> bytes:
    try:
        import zstandard  # optional: only .zst files need it
    except ImportError:
        raise ParlayError(f"{path} needs zstandard: pip install zstandard, or unpack it first") from None
    try:
        with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
            return _unpacked(path, stream)
    except zstandard.ZstdError as error:
        raise ValueError(f"can't read {path}: {error}") from None
