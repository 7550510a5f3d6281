"""Compares the predictions of `parlay plan FILE` with the measured forwards of GGUF files.

    python -m benchmarks.plan.files --files A.gguf B.gguf

The machine is calibrated for each file first, as `parlay plan FILE --calibrate` does, which takes about a minute each.
The files' forwards are timed in turn, with one row of results for each timing, and right before each it is measured how
fast memory is at that moment, as `parlay plan` does at its start.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.commands import begin, one_line_errors, open_results, write_page
from benchmarks.options import add_run_flags, command_parser
from benchmarks.pages import about, table
from parlay.bench.forwards import TimedModel, measure
from parlay.bench.plan.machine import memory_reader
from parlay.bench.records import Row
from parlay.cli.plan_machine import add_machine_flags, check_flags, ground_of, models_of
from parlay.cost.roofline import ForwardShape, Machine, ModelShape
from parlay.models import load
from parlay.options import LoadOptions

ROWS, CONTEXTS, PASSES = (1, 2, 4, 8, 16), (128, 1024, 8192), 7
GOAL = 0.2


@dataclass(frozen=True, slots=True)
class Prediction:
    """The inputs of `parlay plan`: the calibrated machine and the file's shape."""

    machine: Machine
    shape: ModelShape

    def seconds(self, rows: int, context: int, read_bandwidth: float) -> float:
        """Return the predicted seconds of a forward of ``rows`` rows after ``context`` tokens, with memory of this
        bandwidth (0: as in the calibration)."""
        return self.machine.at(read_bandwidth).forward(self.shape, ForwardShape(rows=rows, context=context))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser("plan.files", __doc__)
    parser.add_argument("--files", nargs="+", type=Path, required=True, metavar="FILE", help="GGUF files")
    add_run_flags(parser, quick="use one short text and two passes, to see that it works")
    return parser.parse_args(arguments)


@one_line_errors("plan.files")
def main(arguments: Sequence[str] | None = None) -> None:
    """Predict, measure, and write the page."""
    options = parse(arguments)
    begin(options)
    results = open_results(options, "plan-files", "python -m benchmarks.plan.files --files FILE FILE FILE")
    if not results.rows:
        told = {file.stem: predicted(file, options.threads) for file in options.files}
        runners = {
            file.stem: TimedModel(load(str(file), LoadOptions(threads=options.threads))) for file in options.files
        }
        rows, contexts, passes = ((1, 2), (16,), 2) if options.quick else (ROWS, CONTEXTS, PASSES)
        read = memory_reader("cpu")
        timed = measure(runners, rows, contexts, passes, note=lambda: {"read_bandwidth": read()})
        results.add([_with_prediction(row, told) for row in timed])
    write_page(results.path, report(results.header, results.rows))


def predicted(file: Path, threads: int) -> Prediction:
    """Calibrate the machine for the file's weights, as the command does, and read the file's shape."""
    parser = argparse.ArgumentParser()
    add_machine_flags(parser)
    flags = parser.parse_args([str(file), "--calibrate", "--threads", str(threads)])
    check_flags(flags)
    ground = ground_of(flags)
    return Prediction(ground.machine, models_of(flags, ground).target)


def _with_prediction(row: Row, told: Mapping[str, Prediction]) -> Row:
    if not row.tokens:  # no room for so much text
        return row
    seconds = told[row.cell.model].seconds(row.tokens, row.cell.context, row.values["read_bandwidth"])
    return replace(row, values={**row.values, "predicted": seconds})


def report(header: dict[str, Any], rows: Sequence[Row]) -> str:
    """Write the page in Markdown: a row for each file and context, a column for each number of rows."""
    timed = [row for row in rows if row.tokens]
    cells = {(row.cell.model, row.cell.context, row.tokens) for row in timed}
    errors = [abs(_predicted(timed, *cell) / _measured(timed, *cell) - 1) for cell in cells]
    counts = sorted({rows for _, _, rows in cells})
    lines = [
        [model, str(context), *[_cell(timed, model, context, count) for count in counts]]
        for model, context in sorted({(model, context) for model, context, _ in cells})
    ]
    within = f"{sum(error <= GOAL for error in errors)} of {len(errors)}"
    return "\n".join(
        [
            "# What `parlay plan` says of GGUF files, and what is",
            "",
            about(header),
            "",
            f"Milliseconds of a forward, predicted / measured (medians of {PASSES}). {within} predictions are within "
            f"{GOAL:.0%} of the measurement (goal: all), the median error is {median(errors):.1%}, the worst "
            f"{max(errors):.0%}.",
            "",
            *table(["file", "context", *[f"{count} rows" for count in counts]], lines),
        ]
    )


def _of(rows: Sequence[Row], model: str, context: int, count: int) -> list[Row]:
    return [row for row in rows if (row.cell.model, row.cell.context, row.tokens) == (model, context, count)]


def _measured(rows: Sequence[Row], model: str, context: int, count: int) -> float:
    return median(row.seconds for row in _of(rows, model, context, count))


def _predicted(rows: Sequence[Row], model: str, context: int, count: int) -> float:
    return median(row.values["predicted"] for row in _of(rows, model, context, count))


def _cell(rows: Sequence[Row], model: str, context: int, count: int) -> str:
    return f"{1000 * _predicted(rows, model, context, count):.1f} / {1000 * _measured(rows, model, context, count):.1f}"


if __name__ == "__main__":
    main()
