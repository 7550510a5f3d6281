"""Writes the page of a file of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.gguf import accuracy, bits, loading
from benchmarks.gguf.speed import LLAMA, PROMPT, ROWS, Found
from benchmarks.pages import about, shown, table
from parlay.bench.forwards import FORWARD, WEIGHTS
from parlay.bench.records import OURS, PLAIN, Cell, Row
from parlay.bench.summary import Measurements

DECODING = "decoding"
ACCURACY = """The logits of {tokens} tokens of books and of answers, teacher-forced. The columns are the divergence of
the second engine from the first in nats, the share of equal likeliest tokens, and how much larger the second's
perplexity is. Goals against llama.cpp: 0.001, 98 percent, 0.3 percent. llama.cpp differs from itself by as much: all
engines that round inputs to eight bits are equally far from float32, because a difference in the last bit can end in
another code."""
FORWARDS = f"""For one row and for a prompt of {PROMPT} tokens the table shows llama.cpp's time over Parlay's; for
more rows after 256 tokens, Parlay's over llama.cpp's, as the goals are stated. Each is the median over passes of the
ratio within a pass. The last columns are the time of one row and of 8 rows over the time to read the packed weights.
In brackets: milliseconds of one row. Goals: 8, 16 and 32 rows at most .40, .55 and .60; the prompt at least 1.0; one
row within 1.25 of reading."""
PLAINLY = """Plain decoding of prose, greedy, one request at a time: tokens per second of both engines, and the ratio
of Parlay's speed to llama.cpp's within a round. llama.cpp is called through llama-cpp-python, whose sampling counts
in its time."""
BITS = f"""A text of {bits.TOKENS} tokens is read in several ways. The table counts the logits that differ from those
of the text read in one forward. Goal: none."""
LOADING = """The file is in the disk's cache. A load makes a runner in a process that has imported all that it needs.
Memory is the peak that the load adds, over the file's size. `again` is a second load in the same process, which finds
memory that the machine has already given it. The ratios are of this second load to reading the file into one small
buffer, and to reading it into new memory of the kind that packed weights use. Goals: memory of 1.3 times the size,
1.5 times reading, and 2 s for a process that decodes one token."""


def page(header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Write all tables of the rows."""
    peer = f"llama-cpp-python {header['llama_cpp_python']}"
    lines = ["# GGUF files beside llama.cpp", "", f"{about(header)} Beside it: {peer}.", ""]
    lines += section("Accuracy", ACCURACY.format(tokens=_tokens(rows)), accuracies(rows))
    lines += section("The same bits", BITS, proofs(rows))
    lines += section("Decoding", PLAINLY, decoding(rows))
    lines += section("Forwards", FORWARDS, forwards(rows))
    lines += section("Loading", LOADING, loads(rows))
    return "\n".join(lines)


def section(title: str, words: str, lines: list[str]) -> list[str]:
    """Write a section with a table; nothing if the table has no lines."""
    return [f"## {title}", "", words, "", *lines] if lines else []


def _tokens(rows: Sequence[Row]) -> int:
    return next((row.tokens for row in rows if row.cell.part == accuracy.PART), 0)


def accuracies(rows: Sequence[Row]) -> list[str]:
    own = [row for row in rows if row.cell.part == accuracy.PART]
    lines = [
        (
            row.cell.model,
            row.cell.engine,
            row.cell.strategy,
            f"{row.values['divergence']:.5f}",
            f"{100 * row.values['same']:.1f} %",
            f"{100 * row.values['perplexity']:+.2f} %",
        )
        for row in own
    ]
    return table(("file", "of", "to", "divergence", "same choice", "perplexity"), lines) if own else []


def proofs(rows: Sequence[Row]) -> list[str]:
    head, *lines = bits.table_lines(rows)
    return table(head, lines) if lines else []


def decoding(rows: Sequence[Row]) -> list[str]:
    found = Measurements(row for row in rows if row.cell.part.startswith(DECODING))
    lines = []
    for cell in found.cells:
        if cell.engine != OURS:
            ours = Cell(part=cell.part, model=cell.model, strategy=PLAIN, workload=cell.workload)
            speeds = [found.summary(each) for each in (ours, cell)]
            ratio = found.ratio(ours, cell)
            shown_speeds = (shown(each.speed if each else None, 0) for each in speeds)
            lines.append((cell.model, cell.part.removeprefix(DECODING).strip(), *shown_speeds, shown(ratio)))
    return table(("file", "threads", "Parlay", "llama.cpp", "ratio"), lines) if lines else []


def forwards(rows: Sequence[Row]) -> list[str]:
    cells = [row.cell for row in rows if row.cell.strategy == FORWARD]
    lines = [_forwards_of(rows, *key) for key in dict.fromkeys((cell.model, cell.part) for cell in cells)]
    counts = [f"{count} rows" for count in ROWS[1:]]
    head = ("file", "threads", "1 row", "prompt", *counts, "of reading", "8 rows")
    return table(head, lines) if lines else []


def _forwards_of(rows: Sequence[Row], model: str, part: str) -> tuple[str, ...]:
    found = Found(rows, model, part)
    one = found.ratio((LLAMA, "rows 1"), (OURS, "rows 1"))
    more = (found.ratio((OURS, f"rows {count}"), (LLAMA, f"rows {count}")) for count in ROWS[1:])
    reading = (found.ratio((OURS, f"rows {count}"), (OURS, WEIGHTS)) for count in (1, 8))
    prompt = found.ratio((LLAMA, "prompt"), (OURS, "prompt"))
    times = (1e3 * found.median(engine, "rows 1") for engine in (OURS, LLAMA))
    in_brackets = " / ".join(f"{each:.1f}" for each in times)
    values = (f"{one:.2f} ({in_brackets})", *(f"{each:.2f}" for each in (prompt, *more, *reading)))
    return (model, part.split()[0], *(value.replace("nan", "-") for value in values))


def loads(rows: Sequence[Row]) -> list[str]:
    own = [row for row in rows if row.cell.part == loading.PART]
    lines = [tuple(_load_of(own, model)) for model in dict.fromkeys(row.cell.model for row in own)]
    names = ("file", "load, s", "again, s", "times reading", "into new memory", "memory", "process, s")
    return table(names, lines) if own else []


def _load_of(rows: Sequence[Row], model: str) -> Iterator[str]:
    def middle(strategy: str, workload: str, value: str = "") -> float:
        chosen = [r for r in rows if (r.cell.model, r.cell.strategy, r.cell.workload) == (model, strategy, workload)]
        return median([row.values[value] if value else row.seconds for row in chosen] or [math.nan])

    again = middle(loading.LOAD, loading.AGAIN)
    numbers = (
        middle(loading.LOAD, loading.LOAD),
        again,
        again / middle(loading.LOAD, loading.READ),
        again / middle(loading.LOAD, loading.READ_NEW),
        middle(loading.LOAD, loading.LOAD, "memory"),
        middle(loading.LAUNCH, "1 token"),
    )
    yield model
    yield from (f"{number:.2f}".replace("nan", "-") for number in numbers)
