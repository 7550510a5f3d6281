"""Compares the predictions of `parlay plan` with measurements on this machine, and writes the page.

It calibrates the machine. Then it times forwards of shapes that the calibration did not use, and decodes the ten cells
declared in `cells`, in which the real engine shows whether the plan chooses the fastest strategy. An interrupted run
continues where it stopped.
"""

from __future__ import annotations

import argparse
import gc
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.commands import begin, one_line_errors, open_results, write_page
from benchmarks.options import add_threads_flag, command_parser
from benchmarks.plan.cells import BUDGETS, CELLS, DRAFTS, HELD_OUT, HELD_OUT_WORKS, PLAIN, TARGETS, Cell
from benchmarks.plan.decode import Decoded, Stage
from benchmarks.plan.report import report
from parlay.bench.forwards import FORWARD
from parlay.bench.plan.machine import calibrate_here, open_random
from parlay.bench.records import Cell as Measured
from parlay.bench.records import Results, Row
from parlay.cost.calibrate import SHAPES, WORKS, MachineCalibration, load, measure
from parlay.cost.roofline import ForwardShape, Machine, ModelShape
from parlay.cost.speed import Setting, Speed, predict
from parlay.options import LoadOptions
from parlay.types import Runner

logger = logging.getLogger("benchmarks")
PARTS = ("forwards", "cells")
ROUNDS = 3
_FORWARD_ROUNDS, _FORWARD_SECONDS = 6, 4.0
_TINY = ModelShape(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    tie_embeddings=True,
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser("plan", __doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="use tiny shapes and few tokens, to see that it works")
    parser.add_argument("--fresh", action="store_true", help="overwrite the files instead of continuing them")
    parser.add_argument("--dtype", default="auto", help="type of the weights (default: auto, each model's choice)")
    add_threads_flag(parser)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file of results; page and calibration are written beside it"
    )
    return parser.parse_args(arguments)


@one_line_errors("plan")
def main(arguments: Sequence[str] | None = None) -> None:
    """Calibrate, measure, and write the page."""
    options = parse(arguments)
    begin(options)
    results = open_results(options, "plan", "python -m benchmarks.plan")
    bench = Bench(results, options.dtype, options.quick)
    calibration = bench.calibration(results.path.with_suffix(".calibration.json"), fresh=options.fresh)
    logger.info("the calibration's own median error is %.1f %%", 100 * calibration.median_error)
    if "forwards" in options.only:
        bench.forwards(calibration.machine)
    if "cells" in options.only:
        bench.cells(calibration.machine)
    write_page(results.path, report(results.header, results.rows))


class Bench:
    """The settings of all parts. ``quick`` makes shapes and texts so small that only errors in the program show."""

    def __init__(self, results: Results, dtype: str, quick: bool) -> None:
        self._results, self._dtype, self._quick = results, dtype, quick

    def calibration(self, path: Path, *, fresh: bool) -> MachineCalibration:
        """Return the machine's calibration. If there are results already, their calibration is read from its file."""
        if path.exists() and self._results.rows and not fresh:
            return load(path)
        shapes = [self._sized(shape) for shape in SHAPES]
        made = calibrate_here(LoadOptions(dtype=self._dtype), shapes=shapes, works=self._works(WORKS), log=logger.info)
        made.save(path)
        return made

    def forwards(self, machine: Machine) -> None:
        """Measure and predict the forwards of each shape."""
        for name, shape in HELD_OUT.items():
            cell = Measured(part="forwards", model=name, strategy=FORWARD, workload="")
            if any((row.cell.part, row.cell.model) == ("forwards", name) for row in self._results.rows):
                continue
            works = self._works(HELD_OUT_WORKS)
            runner, kept = self._open(self._sized(shape), max(work.context + work.rows for work in works))
            timed = measure(runner, works, rounds=_FORWARD_ROUNDS, seconds=_FORWARD_SECONDS)
            rows = [_forward_row(cell, each.work, each.seconds, machine.forward(kept, each.work)) for each in timed]
            self._results.add(rows)
            logger.info("forwards of %s", name)

    def cells(self, machine: Machine) -> None:
        """Measure each cell's strategies in turn, round by round."""
        for size in TARGETS:
            own = [(number, self._cell(cell)) for number, cell in enumerate(CELLS) if cell.size == size]
            turns = {cell.name: range(len(self._results.of(_measured(cell, PLAIN))), self._rounds) for _, cell in own}
            if not any(turns.values()):
                continue
            target, kept = self._open(self._sized(TARGETS[size]), *_room(own))
            draft, kept_draft = self._open(self._sized(DRAFTS[size]), *_room(own))
            stage = Stage(target, draft)
            for _, cell in own:
                setting = Setting(machine, kept, cell.batch, cell.context + cell.tokens // 2)
                for turn in turns[cell.name]:
                    self._results.add(self._round(turn, cell, stage, setting, kept_draft))
                    logger.info("%s: round %d", cell.name, turn + 1)

    def _round(self, turn: int, cell: Cell, stage: Stage, setting: Setting, draft: ModelShape) -> list[Row]:
        """Run every strategy once; the order changes from round to round."""
        text = stage.text(cell)
        names = list(BUDGETS)
        order = names[turn % len(names) :] + names[: turn % len(names)]
        rows = []
        for name in order:
            predicted = predict(setting, cell.plan(name, draft))
            row = _cell_row(_measured(cell, name), stage.decode(cell, name), text, predicted)
            rows.append(replace(row, round=turn))
        return rows

    def _open(self, shape: ModelShape, longest: int, batch: int = 1) -> tuple[Runner, ModelShape]:
        gc.collect()  # frees the memory of the last model, which this one may need
        room = 2 * batch * (longest + 64) + 2048
        return open_random(shape, LoadOptions(dtype=self._dtype), max_context=longest + 64, cache_tokens=room)

    @property
    def _rounds(self) -> int:
        return 1 if self._quick else ROUNDS

    def _sized(self, shape: ModelShape) -> ModelShape:
        return replace(_TINY, num_layers=min(shape.num_layers, 3)) if self._quick else shape

    def _works(self, works: Sequence[ForwardShape]) -> list[ForwardShape]:
        return [replace(work, context=work.context // 16) for work in works] if self._quick else list(works)

    def _cell(self, cell: Cell) -> Cell:
        return replace(cell, batch=min(cell.batch, 2), context=cell.context // 16, tokens=12) if self._quick else cell


def _room(cells: Sequence[tuple[int, Cell]]) -> tuple[int, int]:
    """Return the length of the cells' longest sequence, and the largest batch."""
    return max(cell.context + cell.tokens for _, cell in cells), max(cell.batch for _, cell in cells)


def _forward_row(cell: Measured, work: ForwardShape, measured: float, predicted: float) -> Row:
    return Row(
        cell=replace(cell, workload=f"rows {work.rows}", context=work.context),
        values={"rows": work.rows, "context": work.context, "measured": measured, "predicted": predicted},
    )


def _measured(cell: Cell, strategy: str) -> Measured:
    return Measured(part="cells", model=cell.size, strategy=strategy, workload=cell.name, concurrency=cell.batch)


def _cell_row(cell: Measured, decoded: Decoded, text: Sequence[int], predicted: Speed) -> Row:
    return Row(
        cell=cell,
        requests=1,
        tokens=len(decoded.text),
        decode_tokens=decoded.tokens,
        decode_seconds=decoded.seconds,
        same=int(decoded.text == tuple(text)),
        of=1,
        values={"predicted": predicted.tokens_per_second, "tokens_per_step": decoded.tokens_per_step},
    )


if __name__ == "__main__":
    main()
