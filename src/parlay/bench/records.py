"""Reads and writes the rows of results. A row has a cell (who decoded which texts how), a round, and its measurements.

There is one row for each cell and round. A row is stored as one flat record: the cell's fields are among the others,
and fields that have their defaults are left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from parlay.bench.provenance import MAY_DIFFER
from parlay.types import tokens_per_step

PLAIN = "none"
"""Name of plain decoding, the strategy that all others are compared with."""
MEASURED, MODELLED = "measured", "modelled"
"""Whether a row's joules come from counters or from a power model."""
OURS = "parlay"


class System(NamedTuple):
    """An engine, and its strategy or mode."""

    engine: str
    strategy: str

    def __str__(self) -> str:
        """Return the name: the strategy's alone for Parlay, and the engine's before it for others."""
        return self.strategy if self.engine == OURS else f"{self.engine} {self.strategy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The conditions of a measurement. ``engine`` is ``parlay``, or another engine, whose mode is then ``strategy``.

    ``part`` names the measurement if a file holds several that must not be mixed. Each prompt was padded with leading
    filler text to ``context`` tokens; 0 means that prompts were left as they are. Meanwhile ``busy`` other processes
    kept one core each busy.
    """

    part: str = ""
    engine: str = OURS
    model: str
    strategy: str
    workload: str
    concurrency: int = 1
    temperature: float = 0.0
    context: int = 0
    busy: int = 0

    @property
    def system(self) -> System:
        return System(self.engine, self.strategy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One round of a cell. A row with an ``error`` has no numbers. A row without requests says why in ``note``.

    Counts and seconds are summed over the requests of the round. Seconds are wall time, unless the row is ``modelled``.
    """

    cell: Cell
    round: int = 0
    requests: int = 0
    tokens: int = 0
    fresh_tokens: int = 0
    """Number of tokens before the first loop of each output; see `loops`."""
    decode_tokens: int = 0
    """Number of tokens after the first emission. They took ``decode_seconds``."""
    decode_seconds: float = 0.0
    seconds: float = 0.0
    """Seconds from the start of the first request to the end of the last one, without pauses between requests."""
    ttft: tuple[float, ...] = ()
    """Seconds to the first token, per request; a request without output has none."""
    itl: tuple[float, ...] = ()
    """Mean seconds between tokens, per request; a request that emitted once has none."""
    talks: tuple[int, ...] = ()
    """For each number in ``itl``, the number of the request's conversation. Empty if no two requests belong to the same
    conversation, or if it is not known."""
    steps: int = 0
    proposed_by_position: tuple[int, ...] = ()
    """Numbers of nodes proposed at depth 1, 2, ... of drafts. Probes do not count."""
    accepted_by_position: tuple[int, ...] = ()
    proposed_by_source: Mapping[str, int] = field(default_factory=dict)
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)
    prefill_seconds: float = 0.0
    """This and the next three fields divide the time into phases, if the engine reports them."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    overhead_seconds: float = 0.0
    peak_memory_bytes: int = 0
    looped: float | None = None
    """Share of the tokens that lie in verbatim repeats of the request's own output, before outputs were cut."""
    same: int = 0
    """Number of requests whose tokens equal plain decoding's, out of ``of`` that were compared. None are compared if
    the strategy does not promise equality."""
    of: int = 0
    exactness: str = ""
    joules: float | None = None
    energy: str = ""
    """`MEASURED` or `MODELLED`: where ``joules`` come from."""
    modelled: bool = False
    values: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of special measurements, by name."""
    note: str = ""
    error: str = ""
    texts: str = ""
    """The `fingerprint` of the prompts, which tells them from another file's prompts of the same name."""

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed in tokens per second; 0 if nothing was timed."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def tokens_per_step(self) -> float:
        return tokens_per_step(self.tokens, self.steps)

    @property
    def proposed(self) -> int:
        return sum(self.proposed_by_position)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_by_position)

    @property
    def acceptance_rate(self) -> float:
        """Accepted nodes over proposed nodes; 0 if nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0


Record = dict[str, Any]


class Results:
    """A file of results in JSON lines: first a provenance record, then rows. A later run may continue the file.

    `add` writes all its rows in one write, so that an interruption does not leave a part of a round.
    """

    def __init__(
        self, path: Path, header: Record, *, fresh: bool = False, texts: Mapping[str, str] | None = None
    ) -> None:
        """Open ``path`` to append rows; ``fresh`` starts it anew. ``texts`` are the workloads' fingerprints, by name.

        Raises ValueError if the file's rows come from another machine, version or commit, or from other texts of the
        same name, if its lines are not rows, and if it can't be written. So errors come before anything is measured.
        """
        self.path = path
        self.header = header
        self.rows: list[Row] = []
        self._texts = texts or {}
        self._by_cell: dict[Cell, list[Row]] = {}
        if path.exists() and not fresh:
            self.header, found = read(path)
            _check_same_origin(path, self.header, header)
            _check_same_texts(path, found, self._texts)
            _drop_cut_line(path)
            self._sort(found)
        else:
            _begin(path, header)

    def add(self, rows: Sequence[Row]) -> None:
        """Append rows in one write. Raises ValueError if the file can't be written."""
        rows = [replace(row, texts=self._texts.get(row.cell.workload, row.texts)) for row in rows]
        lines = [json.dumps(dump(row), ensure_ascii=False) + "\n" for row in rows]
        with _writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
        self._sort(rows)

    @property
    def cells(self) -> Iterable[Cell]:
        """The cells that have rows."""
        return self._by_cell.keys()

    def of(self, cell: Cell) -> Sequence[Row]:
        """Return the rows of one cell, in the order in which they were measured."""
        return self._by_cell.get(cell, ())

    def _sort(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.rows.append(row)
            self._by_cell.setdefault(row.cell, []).append(row)


def read(path: Path) -> tuple[Record, list[Row]]:
    """Read the header and the rows of a file. A last line that an interruption cut short is left out.

    Raises ValueError if the file can't be read, and for a line that is not a row, with its number.
    """
    try:
        whole, _, _ = path.read_bytes().rpartition(b"\n")
        lines = whole.decode().split("\n")
    except OSError as error:
        raise ValueError(f"can't read the results {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"the results {path} are not UTF-8 (byte {error.start})") from None
    try:
        header: Record = json.loads(lines[0])["provenance"]
        if not isinstance(header, dict):
            raise TypeError("no object")
    except (IndexError, KeyError, TypeError, ValueError, RecursionError):
        raise ValueError(f"{path} does not begin with a provenance record, as files of rows do: name another") from None
    return header, [_row(path, number, line) for number, line in enumerate(lines[1:], start=2)]


def _row(path: Path, number: int, line: str) -> Row:
    try:
        return parse(json.loads(line))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}, line {number}: not a row of results ({error})") from error


def _check_same_origin(path: Path, stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError if the file's rows come from another machine, version or commit than this run."""
    different = [name for name in now if name not in MAY_DIFFER and stored.get(name) != now[name]]
    if different:
        raise ValueError(
            f"{path} holds rows of another run that differs in {', '.join(different)}: "
            "give another --out, or --fresh to start it anew"
        )


def _check_same_texts(path: Path, rows: Sequence[Row], texts: Mapping[str, str]) -> None:
    """Raise ValueError if rows of a workload come from other texts."""
    name = next((row.cell.workload for row in rows if texts.get(row.cell.workload, row.texts) != row.texts), None)
    if name is not None:
        raise ValueError(
            f"{path} holds rows of another workload called {name}: give another --out, or --fresh to start it anew"
        )


def fingerprint(texts: Iterable[object]) -> str:
    """Return a short hash of the ``repr`` of each of the texts."""
    whole = hashlib.sha256()
    for each in texts:
        whole.update(f"{each!r}\n".encode(errors="surrogatepass"))
    return whole.hexdigest()[:16]


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn the system's error about a file that can't be written into a ValueError."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"can't write the results {path}: {error.strerror}") from None


def _begin(path: Path, header: Record) -> None:
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"provenance": header}) + "\n", encoding="utf-8")


def _drop_cut_line(path: Path) -> None:
    with _writing(path), path.open("r+b") as file:
        content = file.read()
        if not content.endswith(b"\n"):
            file.truncate(content.rindex(b"\n") + 1)


def dump(row: Row) -> Record:
    """Return the row as a flat record without fields that have their defaults. Seconds are rounded to microseconds."""
    values = asdict(row)
    flat = {**values.pop("cell"), **values}
    return {name: _rounded(value) for name, value in flat.items() if name not in _DEFAULTS or value != _DEFAULTS[name]}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    return [_rounded(each) for each in value] if isinstance(value, tuple) else value


def parse(record: Record) -> Row:
    """Make a row from a record that `dump` made. Raises TypeError or ValueError for any other value."""
    if not isinstance(record, dict):
        raise TypeError("not an object")
    for name, value in record.items():
        _check(name, value)
    cell = {name: value for name, value in record.items() if name in _CELL}
    own = {name: value for name, value in record.items() if name not in _CELL}
    frozen: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
    return Row(cell=Cell(**cell), **frozen)


_CELL = frozenset(each.name for each in fields(Cell))


def _defaults() -> dict[str, Any]:
    """Return the default of each field that has one, by the field's name."""
    found: dict[str, Any] = {}
    for each in (*fields(Cell), *fields(Row)):
        if each.default is not MISSING:
            found[each.name] = each.default
        elif each.default_factory is not MISSING:
            found[each.name] = each.default_factory()
    return found


_DEFAULTS = _defaults()


def _check(name: str, value: object) -> None:
    """Raise TypeError if the value does not have its field's type."""
    known = _DEFAULTS.get(name, "")  # fields without a default are texts; `Row` refuses unknown names later
    if isinstance(known, bool) or isinstance(value, bool):
        right = isinstance(known, bool) and isinstance(value, bool)
    elif known is None or isinstance(known, float):
        right = isinstance(value, int | float)
    elif isinstance(known, tuple):
        right = isinstance(value, Sequence) and all(_is_number(each) for each in value)
    elif isinstance(known, dict):
        right = isinstance(value, Mapping) and all(_is_number(each) for each in value.values())
    else:
        right = isinstance(value, type(known))
    if not right:
        raise TypeError(f"{name} can't be {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
