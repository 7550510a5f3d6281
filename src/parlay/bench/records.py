"""The rows of results: a cell (which engine and strategy decoded what, and how), a round, and what was measured.

One row per cell and round. Rows are stored flat, the cell's fields beside the others, defaults left out.
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
"""The strategy that all others are compared with."""
MEASURED, MODELLED = "measured", "modelled"
"""The origin of a row's joules."""
OURS = "parlay"


class System(NamedTuple):
    """An engine, and its strategy or mode."""

    engine: str
    strategy: str

    def __str__(self) -> str:
        """A strategy of ours by its name alone, others with their engine's."""
        return self.strategy if self.engine == OURS else f"{self.engine} {self.strategy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The conditions of a measurement. ``engine`` is ``parlay``, or a peer's name, whose mode is then the ``strategy``.

    ``part`` names the measurement where a file holds several that must not be mixed. ``context`` 0 leaves prompts as
    they are; else each was padded with leading filler text to ``context`` tokens. ``busy`` processes burned a core each
    meanwhile.
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
    """One round of a cell. A row with an ``error`` has no numbers; one without requests says why in ``note``.

    Sums are over the requests of the round. Seconds are wall time, unless the row is ``modelled``.
    """

    cell: Cell
    round: int = 0
    requests: int = 0
    tokens: int = 0
    fresh_tokens: int = 0
    """Tokens before each output's first loop: see `loops`."""
    decode_tokens: int = 0
    """Tokens that came after the first emission; the time they took is ``decode_seconds``."""
    decode_seconds: float = 0.0
    seconds: float = 0.0
    """From the first request's start to the last one's end, pauses between requests left out."""
    ttft: tuple[float, ...] = ()
    """Seconds to the first token, per request; a request without output has none."""
    itl: tuple[float, ...] = ()
    """Mean seconds between tokens, per request; a request that emitted once has none."""
    talks: tuple[int, ...] = ()
    """The number of each request's conversation; empty where all requests belong to different ones, or it is not
    known."""
    steps: int = 0
    proposed_by_position: tuple[int, ...] = ()
    """Nodes proposed at depth 1, 2, ... of the draft; probes are not proposals."""
    accepted_by_position: tuple[int, ...] = ()
    proposed_by_source: Mapping[str, int] = field(default_factory=dict)
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)
    prefill_seconds: float = 0.0
    """These four fields: the breakdown of the time, if the engine reports it."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    overhead_seconds: float = 0.0
    peak_memory_bytes: int = 0
    looped: float | None = None
    """Share of the tokens, before anything was cut, that lie in a verbatim repeat of the request's own output."""
    same: int = 0
    """Requests whose tokens equal plain decoding's, out of ``of`` compared; 0 of 0 where no equality is promised."""
    of: int = 0
    exactness: str = ""
    joules: float | None = None
    energy: str = ""
    """How ``joules`` are known: measured or modelled."""
    modelled: bool = False
    values: Mapping[str, float] = field(default_factory=dict)
    """Numbers that only one kind of measurement has, by name."""
    note: str = ""
    error: str = ""
    texts: str = ""
    """The `fingerprint` of the prompts, so that those of another file of the same name are told apart."""

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed; 0 where nothing was timed."""
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
        """Accepted over proposed nodes; 0 where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0


Record = dict[str, Any]


class Results:
    """A file of results: JSON lines, a provenance record first, then rows. A later run continues it.

    Rows that are added together are written in one call, all or none.
    """

    def __init__(
        self, path: Path, header: Record, *, fresh: bool = False, texts: Mapping[str, str] | None = None
    ) -> None:
        """Opens ``path`` to append to it; ``fresh`` starts it anew. ``texts``: the fingerprints of workloads.

        Raises ValueError when its rows come from another machine, version or commit, from other texts of the same name,
        or are no rows, and when it can't be written: now, and not when the first round is over.
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
        """Append rows in one write. Raises ValueError where the file can't be written."""
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
        """The rows of one cell, in the order in which they were measured."""
        return self._by_cell.get(cell, ())

    def _sort(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.rows.append(row)
            self._by_cell.setdefault(row.cell, []).append(row)


def read(path: Path) -> tuple[Record, list[Row]]:
    """Header and rows of a file, without a last line that an interruption cut short.

    Raises ValueError when there is no such file, or when a line is no row, with its number.
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
        raise ValueError(f"{path} does not begin with a provenance record: give another --out, or --fresh") from None
    return header, [_row(path, number, line) for number, line in enumerate(lines[1:], start=2)]


def _row(path: Path, number: int, line: str) -> Row:
    try:
        return parse(json.loads(line))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}, line {number}: no row of results ({error})") from error


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
            f"{path} holds rows of other texts called {name}: give another --out, or --fresh to start it anew"
        )


def fingerprint(texts: Iterable[object]) -> str:
    """A short hash of texts, by all that their ``repr`` says."""
    whole = hashlib.sha256()
    for each in texts:
        whole.update(f"{each!r}\n".encode(errors="surrogatepass"))
    return whole.hexdigest()[:16]


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise ValueError in place of the system's error for a file that can't be written."""
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
    """The row as flat plain data: defaults left out, seconds to the microsecond."""
    values = asdict(row)
    flat = {**values.pop("cell"), **values}
    return {name: _rounded(value) for name, value in flat.items() if name not in _DEFAULTS or value != _DEFAULTS[name]}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    return [_rounded(each) for each in value] if isinstance(value, tuple) else value


def parse(record: Record) -> Row:
    """The row of flat plain data. Raises TypeError or ValueError for anything else."""
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
    """Defaults by the name of the field."""
    found: dict[str, Any] = {}
    for each in (*fields(Cell), *fields(Row)):
        if each.default is not MISSING:
            found[each.name] = each.default
        elif each.default_factory is not MISSING:
            found[each.name] = each.default_factory()
    return found


_DEFAULTS = _defaults()


def _check(name: str, value: object) -> None:
    """Raise TypeError if the value is not of its field's kind."""
    known = _DEFAULTS.get(name, "")  # those without a default are text; a name that is no field is found later
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
