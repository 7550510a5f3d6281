"""Rows of the figures, one per measurement of one system, in a journal of results that runs resume in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from parlay.bench import journal


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


class Results(journal.Journal[Row]):
    """Rows on disk, each block appended in one write."""

    def __init__(self, path: Path, header: dict[str, Any], *, fresh: bool = False) -> None:
        """Opens ``path`` to go on where it ends.

        Raises:
            ValueError: when its rows come from another machine, version or commit.
        """
        super().__init__(path, header, parse, compact, fresh=fresh)
        self._done = {row.block for row in self.rows}

    def has(self, block: Block) -> bool:
        """Whether the block is measured already."""
        return block in self._done

    def add(self, rows: Sequence[Row]) -> None:
        """Store the rows of one block."""
        super().add(rows)
        self._done |= {row.block for row in rows}

    def of(self, part: str, model: str | None = None) -> list[Row]:
        """The rows of one part."""
        return [row for row in self.rows if row.part == part and model in (None, row.model)]


def read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Header and rows of a file; a last line that an interruption cut short is left out.

    Raises:
        ValueError: when a line is no row of this format, with its number.
    """
    return journal.read(path, parse)


def parse(record: dict[str, Any]) -> Row:
    """Raises TypeError for what is no row."""
    return Row(**record)


def compact(row: Row) -> dict[str, Any]:
    """The row as plain data: defaults left out, seconds to the microsecond."""
    return journal.compact(asdict(row), asdict(Row(part="")))
