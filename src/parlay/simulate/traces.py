"""Reads recorded traffic: tables of times and lengths, as Azure publishes them, and logs of `parlay serve`."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from parlay.simulate.traffic import Arrival, Traffic, with_histories

TIMES = ("TIMESTAMP", "timestamp", "time", "arrival_time")
PROMPTS = ("ContextTokens", "prompt_tokens", "input_tokens", "input_length")
OUTPUTS = ("GeneratedTokens", "output_tokens", "completion_tokens", "output_length")
SHAPES = (
    "give a table (CSV with a header, or JSON lines) with columns time, prompt_tokens and output_tokens, Azure's "
    "TIMESTAMP, ContextTokens and GeneratedTokens, or the log of parlay serve --log-format json"
)
_FRACTION = re.compile(r"(\.\d{6})\d+")


def read_trace(path: Path, most: int | None = None) -> Traffic:
    """Read the first ``most`` requests of a file, or all of them.

    A table may also have the columns ``kind`` and ``session``. Times are seconds, or dates in ISO 8601. Raises
    ValueError if the file can't be read or lacks a column, if times are negative or not in order, and for lengths
    below 1.
    """
    try:
        return _read(path, most)
    except (csv.Error, OverflowError) as error:
        raise ValueError(f"{path} has a line or a number that can't be read ({error}): {SHAPES}") from None


def _read(path: Path, most: int | None) -> Traffic:
    text = _text(path)
    if text.lstrip().startswith("{"):
        return _from_json(path, text, most)
    rows = csv.DictReader(io.StringIO(text))
    if not rows.fieldnames:
        raise ValueError(f"{path} is empty: {SHAPES}")
    _check_columns(path, set(rows.fieldnames))
    return _table(path, ((f"line {rows.line_num}", row) for row in rows), most)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file: {SHAPES}") from None


def _check_columns(path: Path, names: set[str]) -> None:
    for label, known in (("time", TIMES), ("prompt", PROMPTS), ("output", OUTPUTS)):
        if not names & set(known):
            have = ", ".join(sorted(map(str, names)))[:120]
            raise ValueError(f"{path} has no column for the {label} ({' or '.join(known)}), but {have}: {SHAPES}")


def _table(path: Path, rows: Iterator[tuple[str, Mapping[str, Any]]], most: int | None) -> Traffic:
    arrivals: list[Arrival] = []
    begin = None
    for place, row in rows:
        if len(arrivals) == most:
            break
        where = f"{path}, {place}"
        seconds = _seconds(_field(row, TIMES, where), where)
        begin = seconds if begin is None else begin
        if arrivals and seconds - begin < arrivals[-1].seconds:
            back = arrivals[-1].seconds - (seconds - begin)
            raise ValueError(f"{where}: the time goes back by {back:g} s: sort the requests by time")
        prompt, output = (_count(row, names, where) for names in (PROMPTS, OUTPUTS))
        kind, session = (str(row.get(name) or "") for name in ("kind", "session"))
        arrivals.append(Arrival(seconds - begin, prompt, output, kind, session))
    if not arrivals:
        raise ValueError(f"{path} has no requests: {SHAPES}")
    return Traffic(path.name, with_histories(arrivals))


def _field(row: Mapping[str, Any], names: tuple[str, ...], where: str) -> Any:
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ValueError(f"{where}: {names[0]} is missing")


def _seconds(value: Any, where: str) -> float:
    """Return a time in seconds, given as a number or a date."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = _date(str(value), where)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{where}: the time {value!r:.40} must be a number of seconds from 0 on, or a date")
    return seconds


def _date(text: str, where: str) -> float:
    try:
        when = datetime.fromisoformat(_FRACTION.sub(r"\1", text.strip()))
    except ValueError:
        raise ValueError(
            f"{where}: {text!r:.40} is not a time: give seconds, or a date as in 2023-11-16 18:15:46"
        ) from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _count(row: Mapping[str, Any], names: tuple[str, ...], where: str) -> int:
    value = _field(row, names, where)
    name = next(name for name in names if row.get(name) is not None)
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = 0
    part = isinstance(value, bool) or (isinstance(value, float) and value != count)
    if part or not 1 <= count < 1 << 31:
        raise ValueError(f"{where}: {name} {value!r:.40} must be a whole number from 1 on")
    return count


# -------------------------------------------------------------------------------------------------------- JSON lines


def _from_json(path: Path, text: str, most: int | None) -> Traffic:
    """Read a table in JSON lines, or the log of a server, which has an object for each finished request."""
    records = _records(path, text)
    first = next(records, None)
    if first is None:
        raise ValueError(f"{path} has no requests: {SHAPES}")
    if {"time", "level", "logger", "message"} <= first[1].keys():
        return _log(path, [first, *records], most)
    _check_columns(path, set(first[1]))

    def all_records() -> Iterator[tuple[str, Mapping[str, Any]]]:
        yield first
        yield from records

    return _table(path, all_records(), most)


def _records(path: Path, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                raise ValueError(f"{path}, line {number}: not JSON") from None
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number}: not an object: {SHAPES}")
            yield f"line {number}", record


def _log(path: Path, records: list[tuple[str, Mapping[str, Any]]], most: int | None) -> Traffic:
    """Read a server's log. A record has the time when its request ended, so the request arrived ``seconds`` earlier."""
    found = []
    empty = 0
    for place, record in records:
        request = record.get("request")
        if not isinstance(request, dict):
            continue  # a line about something else
        where = f"{path}, {place}"
        try:
            prompt, output, cached = (
                int(request[name]) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
            )
            took = float(request["seconds"])
            if not 0 <= took < math.inf or cached < 0:
                raise ValueError("seconds or cached_tokens is out of range")
            seconds = _seconds(record["time"], where) - took
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: not a request of the log of parlay serve ({error})") from None
        if prompt < 1 or output < 1:
            empty += 1
            continue
        found.append(Arrival(seconds, prompt, output, common=min(cached, prompt)))
    if not found:
        raise ValueError(f"{path} has no finished request: start the server with --log-level info --log-format json")
    found.sort(key=lambda each: each.seconds)
    begin = found[0].seconds
    notes = [f"{empty:,} requests without tokens were left out."] if empty else []
    if any(each.common for each in found):
        notes.append(
            "Tokens that were cached according to the log are assumed to be cached on each server after its first "
            "request."
        )
    arrivals = [each._replace(seconds=each.seconds - begin) for each in found[:most]]
    return Traffic(path.name, arrivals, tuple(notes))
