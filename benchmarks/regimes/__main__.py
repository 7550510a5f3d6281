"""`auto` against static strategies where the kind of text changes within an answer: how soon it is as good as the best.

    python -m benchmarks.regimes --data DIR                # goes on where the last run ended
    python -m benchmarks.regimes --data DIR --texts-only   # makes the texts, which later runs find in the cache

Every strategy writes the same given texts, so that it meets each change at the same token. Prose is what the model
itself wrote, so that a trained head is right about it as often as it would be; documents and calls are given. For each
stretch of one kind the time from the step after the change on is compared with that of each static strategy for the
same tokens, and the time of the first steps, which show what the change costs.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from benchmarks.commands import begin, one_line_errors, open_results, results_path, write_page
from benchmarks.options import add_run_flags
from benchmarks.regimes.page import ALIKE, AUTO, CLOCK, page
from benchmarks.regimes.texts import Given, Scribe, keep, kept, materials, questions
from benchmarks.regimes.trace import EARLY, LATE, Trace, Writer, parts, smoothed
from benchmarks.router import head
from benchmarks.setup import FULL, SMOLLM2, SMOLLM2_BF16, Setup
from parlay.bench import records
from parlay.bench.records import PLAIN, Cell, Results, Row
from parlay.bench.rounds import rotated
from parlay.llm import LLM

STATIC = (PLAIN, "prompt-lookup", "suffix-decoding", "eagle3", "union:of=prompt-lookup+eagle3")
_WARM = 32  # tokens that each strategy writes before anything counts

logger = logging.getLogger("benchmarks")


def cells_of(model: str, text: Given, strategies: Sequence[str]) -> list[list[Cell]]:
    """For each stretch one of each strategy. The part names the change."""
    before = ("start", *(stretch.kind for stretch in text.stretches))
    return [
        [
            Cell(part=f"{last} to {stretch.kind}", model=model, strategy=each, workload=f"{text.name}.{number}")
            for each in strategies
        ]
        for number, (last, stretch) in enumerate(zip(before, text.stretches, strict=False), start=1)
    ]


class Measurement:
    """One model that writes its texts under all strategies in turn."""

    def __init__(self, writer: Writer, model: str, strategies: Sequence[str], results: Results) -> None:
        self._writer, self._model, self._strategies, self._results = writer, model, strategies, results

    def run(self, texts: Sequence[Given], rounds: int, ends: float) -> None:
        """Each round that is lacking, until ``ends`` (of `time.monotonic`); a text's rows are in the file at once."""
        for strategy in self._strategies:
            self._writer.write(strategy, texts[0], _WARM)
        for number in range(rounds):
            for turn, text in enumerate(texts):
                cells = cells_of(self._model, text, self._strategies)
                if time.monotonic() >= ends:
                    return
                if len(self._results.of(cells[0][0])) <= number:
                    logger.info("%s: text %s, round %d", self._model, text.name, number + 1)
                    self._results.add(self._measured(text, cells, number, turn))

    def _measured(self, text: Given, cells: Sequence[Sequence[Cell]], number: int, turn: int) -> list[Row]:
        traces = {cell.strategy: self._writer.write(cell.strategy, text) for cell in rotated(cells[0], number + turn)}
        alike = smoothed(traces)
        return [
            _row(cell, number, traces[cell.strategy], alike[cell.strategy], parts(stretch, traces[AUTO]))
            for stretch, own in zip(text.stretches, cells, strict=True)
            for cell in own
        ]


def _row(cell: Cell, number: int, trace: Trace, alike: Trace, ranges: Mapping[str, tuple[int, int]]) -> Row:
    """What one strategy took for one stretch, by the clock and as `smoothed` has it."""
    values: dict[str, float] = {}
    for part, (start, end) in ranges.items():
        values[f"{part} tokens"] = end - start
        values[f"{part} {CLOCK}"] = trace.at(end) - trace.at(start)
        values[f"{part} {ALIKE}"] = alike.at(end) - alike.at(start)
    start, end = ranges[EARLY][0], ranges[LATE][1]
    return Row(
        cell=cell,
        round=number,
        requests=1,
        tokens=end - start,
        decode_tokens=end - start,
        decode_seconds=trace.at(end) - trace.at(start),
        steps=trace.steps_in(start, end),
        values=values,
    )


def texts_of(llm: LLM, model: str, options: argparse.Namespace) -> list[Given]:
    """Those that were made before, or new ones."""
    source = "published" if options.data else "built-in"
    path = options.cache / f"regimes-{model}-{source}-{options.texts}x{options.length}.json"
    if not path.exists():
        logger.info("%s: making texts", model)
        scribe = Scribe(llm, options.length, questions(options.data))
        made = scribe.texts(materials(options.data), options.texts)
        if not made:
            raise ValueError(f"{model} writes no prose that neither loops nor copies")
        keep(path, made)
    return kept(path)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.regimes", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="published sets of prompts; without it, built-in ones")
    parser.add_argument("--models", nargs="+", default=[SMOLLM2, SMOLLM2_BF16], metavar="MODEL")
    parser.add_argument("--texts", type=int, default=8, help="of each model (default: 8)")
    parser.add_argument("--length", type=int, default=96, help="tokens of a stretch at most (default: 96)")
    parser.add_argument("--strategies", nargs="+", default=list(STATIC), metavar="SPEC", help="to compare `auto` with")
    parser.add_argument("--rounds", type=int, default=2, help="over all texts (default: 2)")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="N", help="no text begins after so many")
    parser.add_argument("--texts-only", action="store_true", help="make the texts, and measure nothing")
    parser.add_argument("--page", action="store_true", help="make the page again from the file, and measure nothing")
    add_run_flags(parser)
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> None:
    """The models one after the other."""
    command = f"python -m benchmarks.regimes{' --data DIR' if options.data else ''}"
    results = None if options.texts_only else open_results(options, "regimes", command, {"head": head()})
    ends = time.monotonic() + 60 * options.minutes
    setup = Setup(FULL, options.data, options.cache)
    for model in options.models:
        with closing(setup.llm(model)) as llm:
            texts = texts_of(llm, model, options)
            if results is not None:
                measurement = Measurement(Writer(llm), model, (*options.strategies, AUTO), results)
                measurement.run(texts, options.rounds, ends)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    options = parse(arguments)
    begin(options)
    if options.quick:
        options.texts, options.length, options.rounds = 1, 32, 1
    with one_line_errors("regimes"):
        if not options.page:
            measure(options)
        if not options.texts_only:
            path = results_path(options, "regimes")
            write_page(path, page(*records.read(path)))


if __name__ == "__main__":
    main()
