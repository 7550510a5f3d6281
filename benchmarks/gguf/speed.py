"""Compares the time of forwards with llama.cpp's on the same file: some rows after a text, and a prompt."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.gguf.llama import LlamaCpp
from parlay import models
from parlay.bench.forwards import FORWARD, WEIGHTS, time_reading, weight_bytes
from parlay.bench.records import OURS, Cell, Row
from parlay.options import LoadOptions
from parlay.system import threads
from parlay.system.terminal import counted
from parlay.types import Segment, trees

LLAMA = "llama-cpp-python"
ROWS = (1, 2, 4, 8, 16, 32)
CONTEXT, PROMPT = 256, 512
PAUSE_SECONDS = 0.02
"""A pause in seconds after which the threads of one engine have stopped spinning, before the other begins."""
FIRST = 10
"""The first token of each text; the following tokens are the next numbers."""


class Engine(Protocol):
    """Runs forwards of one model. Each call returns its seconds."""

    def use(self, threads: int) -> None:
        """Use a number of threads from now on."""
        ...

    def rows(self, count: int) -> float:
        """Verify a number of tokens after a text of `CONTEXT` tokens, with logits for each."""
        ...

    def prompt(self) -> float:
        """Read a new text of `PROMPT` tokens, with logits for the last."""
        ...


class Ours:
    """Runs Parlay's forwards."""

    def __init__(self, path: Path) -> None:
        self._runner = models.load(str(path), LoadOptions(), cache_tokens=4 * PROMPT)
        self._text = tuple(range(FIRST, FIRST + CONTEXT))
        self._runner.open(0, self._text)
        self._runner.reserve(0, CONTEXT + max(ROWS))
        self._runner.forward([Segment(0, self._text, logits_from=CONTEXT)])
        self._runner.keep(0, ())

    def use(self, threads_: int) -> None:
        threads.use(threads_)

    def rows(self, count: int) -> float:
        root, *draft = range(FIRST, FIRST + count)
        segment = Segment(0, (root,), trees.chain_tree(draft))
        began = time.perf_counter()
        self._runner.forward([segment])
        return time.perf_counter() - began

    def prompt(self) -> float:
        text = tuple(range(FIRST, FIRST + PROMPT))
        self._runner.open(1, text[:1])
        self._runner.reserve(1, PROMPT)
        began = time.perf_counter()
        self._runner.forward([Segment(1, text, logits_from=PROMPT - 1)])
        seconds = time.perf_counter() - began
        self._runner.release(1)
        return seconds


class Theirs:
    """Runs llama.cpp's forwards."""

    def __init__(self, path: Path, llama: LlamaCpp) -> None:
        self._llama = llama
        llama.open(path, 1)

    def use(self, threads: int) -> None:
        self._llama.use(threads)

    def rows(self, count: int) -> float:
        """Time ``count`` rows. The cache may hold another text by now, but only its length matters."""
        return self._llama.forward(range(FIRST, FIRST + count), CONTEXT, every=True)

    def prompt(self) -> float:
        return self._llama.forward(range(FIRST, FIRST + PROMPT), 0, every=False)


def measure(path: Path, llama: LlamaCpp, counts: Sequence[int], passes: int, prompts: int) -> Iterator[Row]:
    """Yield rows of all engines and row counts in turn, in each pass and with each number of threads.

    Prompts are measured in the first ``prompts`` passes only.
    """
    engines: dict[str, Engine] = {OURS: Ours(path), LLAMA: Theirs(path, llama)}
    size = weight_bytes(path, "")
    for count in counts:
        for engine in engines.values():
            engine.use(count)
            engine.prompt()
            engine.rows(max(ROWS))
        with threads.using(count):
            for turn in range(passes):
                yield from _pass(engines, path.stem, count, turn, prompts=turn < prompts)
                seconds = time_reading(size, "cpu")
                yield Row(cell=_cell(OURS, path.stem, count, WEIGHTS), round=turn, seconds=seconds)


def _pass(engines: Mapping[str, Engine], model: str, count: int, turn: int, *, prompts: bool) -> Iterator[Row]:
    for rows in ROWS:
        for name, engine in engines.items():
            time.sleep(PAUSE_SECONDS)
            engine.rows(rows)  # the first after a pause finds threads asleep
            seconds = engine.rows(rows)
            yield Row(cell=_cell(name, model, count, f"rows {rows}"), round=turn, steps=1, tokens=rows, seconds=seconds)
    for name, engine in engines.items() if prompts else ():
        time.sleep(PAUSE_SECONDS)
        seconds = engine.prompt()
        yield Row(cell=_cell(name, model, count, "prompt"), round=turn, steps=1, tokens=PROMPT, seconds=seconds)


def _cell(engine: str, model: str, count: int, what: str) -> Cell:
    context = 0 if what == "prompt" else CONTEXT
    return Cell(part=part_of(count), engine=engine, model=model, strategy=FORWARD, workload=what, context=context)


def part_of(count: int) -> str:
    """Return the name that cells give a number of threads."""
    return counted(count, "thread")


class Found:
    """The seconds of one model with one number of threads, of each pass, by engine and kind of forward."""

    def __init__(self, rows: Sequence[Row], model: str, part: str) -> None:
        self._seconds: dict[tuple[str, str], list[float]] = {}
        for row in rows:
            if row.cell.strategy == FORWARD and (row.cell.model, row.cell.part) == (model, part):
                self._seconds.setdefault((row.cell.engine, row.cell.workload), []).append(row.seconds)

    def median(self, engine: str, what: str) -> float:
        """Return the median seconds; NaN if it was not measured."""
        return statistics.median(self._seconds.get((engine, what), [math.nan]))

    def ratio(self, one: tuple[str, str], other: tuple[str, str]) -> float:
        """Return the median over passes of the ratio of seconds, ``one`` over ``other``; NaN if one of them was not
        measured."""
        pairs = zip(self._seconds.get(one, ()), self._seconds.get(other, ()), strict=False)
        return statistics.median([a / b for a, b in pairs] or [math.nan])
