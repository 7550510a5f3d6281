"""A file of results: JSON lines, a provenance record first, then rows. A later run continues it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from parlay.bench.provenance import MAY_DIFFER

R = TypeVar("R")
Record = dict[str, Any]


class Journal(Generic[R]):
    """Rows on disk and in memory. Rows that are added together are written in one call, all or none."""

    def __init__(
        self,
        path: Path,
        header: Record,
        parse: Callable[[Record], R],
        dump: Callable[[R], Record],
        *,
        fresh: bool = False,
    ) -> None:
        """Opens ``path`` to go on where it ends; ``fresh`` starts it anew.

        Raises ValueError when its rows come from another machine, version or commit, or are not rows of this kind, and
        when it can't be written.
        """
        self.path = path
        self.header = header
        self.rows: list[R] = []
        self._dump = dump
        if path.exists() and not fresh:
            self.header, self.rows = read(path, parse)
            check_same_origin(path, self.header, header)
            _drop_cut_line(path)
        else:
            _begin(path, header)

    def add(self, rows: Sequence[R]) -> None:
        """Append rows in one write."""
        lines = [json.dumps(self._dump(row), ensure_ascii=False) + "\n" for row in rows]
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
        self.rows += rows


def read(path: Path, parse: Callable[[Record], R]) -> tuple[Record, list[R]]:
    """Header and rows of a file, without a last line that an interruption cut short.

    Raises ValueError when there is no such file, or when a line is no row of this kind, with its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"can't read the results {path}: {error}") from None
    try:
        header: Record = json.loads(lines[0])["provenance"]
    except (IndexError, KeyError, TypeError, json.JSONDecodeError):
        raise ValueError(f"{path} does not begin with a provenance record: give another --out, or --fresh") from None
    return header, [_row(path, number, line, parse) for number, line in enumerate(lines[1:], start=2)]


def check_same_origin(path: Path, stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError if the file's rows come from another machine, version or commit than this run."""
    different = [name for name in now if name not in MAY_DIFFER and stored.get(name) != now[name]]
    if different:
        raise ValueError(
            f"{path} holds rows of another run that differs in {', '.join(different)}: "
            "give another --out, or --fresh to start it anew"
        )


def compact(row: Mapping[str, Any], defaults: Mapping[str, Any]) -> Record:
    """A row as plain data: defaults left out, seconds to the microsecond."""
    return {name: _rounded(value) for name, value in row.items() if name not in defaults or value != defaults[name]}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    return [_rounded(each) for each in value] if isinstance(value, tuple) else value


def _row(path: Path, number: int, line: str, parse: Callable[[Record], R]) -> R:
    try:
        return parse(json.loads(line))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}, line {number}: no row of results ({error})") from error


def _begin(path: Path, header: Record) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"provenance": header}) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"can't write the results {path}: {error.strerror}") from None


def _drop_cut_line(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):
        path.write_text(text[: text.rindex("\n") + 1], encoding="utf-8")
