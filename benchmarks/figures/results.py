"""The file of results: JSON lines, a provenance record first, then one row per measurement; runs resume in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.figures.provenance import MAY_DIFFER


class Block(NamedTuple):
    """What is measured together, interleaved, and stored all or nothing."""

    part: str
    model: str
    kind: str
    prompt: int
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement of one system. Seconds are wall time; a row with an ``error`` has no numbers.

    ``decode_tokens`` are those that came after the first emission and ``decode_seconds`` the time they took;
    ``first_seconds`` passed before it. ``same``: the text is that of plain decoding. ``values`` are a part's own
    numbers, by name.
    """

    part: str
    model: str = ""
    kind: str = ""
    prompt: int = 0
    round: int = 0
    system: str = ""
    tokens: int = 0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    first_seconds: float = 0.0
    steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    same: bool | None = None
    looped: float | None = None
    values: dict[str, float] | None = None
    note: str = ""
    error: str = ""

    @property
    def rate(self) -> float:
        """Decoded tokens per second; 0 where nothing was timed."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def block(self) -> Block:
        return Block(self.part, self.model, self.kind, self.prompt, self.round)


class Results:
    """Rows on disk, each block appended in one write."""

    def __init__(self, path: Path, header: dict[str, Any], *, fresh: bool = False) -> None:
        """Opens ``path`` to go on where it ends.

        Raises:
            ValueError: when its rows come from another machine, version or commit.
        """
        self.path = path
        self.rows: list[Row] = []
        if path.exists() and not fresh:
            self.header, self.rows = read(path)
            check_same_origin(path, self.header, header)
        else:
            self.header = header
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"provenance": header}) + "\n", encoding="utf-8")
        self._done = {row.block for row in self.rows}

    def has(self, block: Block) -> bool:
        """Whether the block is measured already."""
        return block in self._done

    def add(self, rows: Sequence[Row]) -> None:
        """Store the rows of one block."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(compact(row), ensure_ascii=False) + "\n" for row in rows))
        self.rows += rows
        self._done |= {row.block for row in rows}

    def of(self, part: str, model: str | None = None) -> list[Row]:
        """The rows of one part."""
        return [row for row in self.rows if row.part == part and model in (None, row.model)]


def read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Header and rows of a file; a last line that an interruption cut short is left out.

    Raises:
        ValueError: when a line is no row of this format, with its number.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        path.write_text("".join(lines), encoding="utf-8")
    try:
        header: dict[str, Any] = json.loads(lines[0])["provenance"]
    except (IndexError, KeyError, TypeError, json.JSONDecodeError):
        raise ValueError(f"{path} does not begin with a provenance record: give another --out, or --fresh") from None
    return header, list(_rows(path, lines[1:]))


def _rows(path: Path, lines: Iterable[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=2):
        try:
            yield Row(**json.loads(line))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}, line {number}: no row of results ({error})") from error


def check_same_origin(path: Path, stored: dict[str, Any], now: dict[str, Any]) -> None:
    """Rows of two machines or two commits do not belong into one file."""
    different = [name for name in now if name not in MAY_DIFFER and stored.get(name) != now[name]]
    if different:
        raise ValueError(
            f"{path} holds rows of another run that differs in {', '.join(different)}: "
            "give another --out, or --fresh to start it anew"
        )


def compact(row: Row) -> dict[str, Any]:
    """The row as plain data: defaults left out, seconds to the microsecond."""
    defaults = asdict(Row(part=""))
    values = {name: value for name, value in asdict(row).items() if value != defaults[name]}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}
