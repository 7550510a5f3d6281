"""Holds what `parlay plan` says against this machine: calibrates it, predicts, measures, and writes the page.

First the calibration, then forwards of shapes that it never saw, then ten cells declared in `cells`, in each of which
the strategy that the plan would choose is compared with the fastest through the real engine. An interrupted run goes on
where it stopped.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.figures.results import Block, Results, Row
from benchmarks.options import add_threads_flag
from benchmarks.plan.cells import BUDGETS, CELLS, DRAFTS, HELD_OUT, HELD_OUT_WORKS, TARGETS, Cell
from benchmarks.plan.decode import Decoded, Stage
from benchmarks.plan.report import report
from parlay import threads
from parlay.bench.provenance import ROOT, provenance
from parlay.cost.calibrate import SHAPES, WORKS, Calibration, load, measure
from parlay.cost.roofline import Machine, Shape, Work
from parlay.cost.speed import Setting, predict
from parlay.options import LoadOptions
from parlay.plan.machine import calibrate_here, open_random
from parlay.types import Runner

logger = logging.getLogger("benchmarks")
PARTS = ("forwards", "cells")
ROUNDS = 3
_FORWARD_ROUNDS, _FORWARD_SECONDS = 6, 4.0
_TINY = Shape(
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
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few tokens: does it work?")
    parser.add_argument("--fresh", action="store_true", help="start the files anew")
    parser.add_argument("--dtype", default="auto", help="of the weights (default: auto, as models choose it)")
    add_threads_flag(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="results; page and calibration go beside it")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, measure, write the page."""
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    threads.use(options.threads)
    out = options.out or ROOT / "benchmarks" / "results" / f"plan{'-quick' if options.quick else ''}.jsonl"
    try:
        results = Results(out, provenance("python -m benchmarks.plan"), fresh=options.fresh)
    except ValueError as error:
        print(f"benchmarks.plan: {error}", file=sys.stderr)
        return 1
    bench = Bench(results, options.dtype, options.quick)
    calibration = bench.calibration(out.with_suffix(".calibration.json"), fresh=options.fresh)
    logger.info("the calibration's own median error is %.1f %%", 100 * calibration.median_error)
    if "forwards" in options.only:
        bench.forwards(calibration.machine)
    if "cells" in options.only:
        bench.cells(calibration.machine)
    page = out.with_suffix(".md")
    page.write_text(report(results.header, results.rows), encoding="utf-8")
    print(f"wrote {out} and {page.name}")
    return 0


class Bench:
    """What all parts share. ``quick`` shrinks shapes and lengths until nothing is worth reading but that it ran."""

    def __init__(self, results: Results, dtype: str, quick: bool) -> None:
        self._results, self._dtype, self._quick = results, dtype, quick

    def calibration(self, path: Path, *, fresh: bool) -> Calibration:
        """The one that the results rest on: measured once, then read again."""
        if path.exists() and self._results.rows and not fresh:
            return load(path)
        shapes = [self._sized(shape) for shape in SHAPES]
        made = calibrate_here(LoadOptions(dtype=self._dtype), shapes=shapes, works=self._works(WORKS), log=logger.info)
        made.save(path)
        return made

    def forwards(self, machine: Machine) -> None:
        """Each shape's forwards, measured and predicted."""
        for name, shape in HELD_OUT.items():
            block = Block("forwards", name, "", 0, 0)
            if self._results.has(block):
                continue
            works = self._works(HELD_OUT_WORKS)
            runner, kept = self._open(self._sized(shape), max(work.context + work.rows for work in works))
            timed = measure(runner, works, rounds=_FORWARD_ROUNDS, seconds=_FORWARD_SECONDS)
            rows = [_forward_row(block, work, seconds, machine.forward(kept, work)) for work, seconds in timed]
            self._results.add(rows)
            logger.info("forwards of %s", name)

    def cells(self, machine: Machine) -> None:
        """Each cell's strategies, in turns, a round of them at a time."""
        for size in TARGETS:
            own = [(number, self._cell(cell)) for number, cell in enumerate(CELLS) if cell.size == size]
            rounds = [
                Block("cells", size, cell.name, number, turn) for number, cell in own for turn in range(self._rounds)
            ]
            if all(map(self._results.has, rounds)):
                continue
            target, kept = self._open(self._sized(TARGETS[size]), *_room(own))
            draft, kept_draft = self._open(self._sized(DRAFTS[size]), *_room(own))
            stage = Stage(target, draft)
            cells = dict(own)
            for block in rounds:
                if not self._results.has(block):
                    cell = cells[block.prompt]
                    setting = Setting(machine, kept, cell.batch, cell.context + cell.tokens // 2)
                    self._results.add(self._round(block, cell, stage, setting, kept_draft))
                    logger.info("%s: round %d", cell.name, block.round + 1)

    def _round(self, block: Block, cell: Cell, stage: Stage, setting: Setting, draft: Shape) -> list[Row]:
        """Every strategy once; who begins changes."""
        text = stage.text(cell)
        names = list(BUDGETS)
        order = names[block.round % len(names) :] + names[: block.round % len(names)]
        return [
            _cell_row(
                block, name, stage.decode(cell, name), text, predict(setting, cell.plan(name, draft)).tokens_per_second
            )
            for name in order
        ]

    def _open(self, shape: Shape, longest: int, batch: int = 1) -> tuple[Runner, Shape]:
        gc.collect()  # of a former model, whose memory this one may need
        room = 2 * batch * (longest + 64) + 2048
        return open_random(shape, LoadOptions(dtype=self._dtype), max_context=longest + 64, cache_tokens=room)

    @property
    def _rounds(self) -> int:
        return 1 if self._quick else ROUNDS

    def _sized(self, shape: Shape) -> Shape:
        return replace(_TINY, num_layers=min(shape.num_layers, 3)) if self._quick else shape

    def _works(self, works: Sequence[Work]) -> list[Work]:
        return [replace(work, context=work.context // 16) for work in works] if self._quick else list(works)

    def _cell(self, cell: Cell) -> Cell:
        return replace(cell, batch=min(cell.batch, 2), context=cell.context // 16, tokens=12) if self._quick else cell


def _room(cells: Sequence[tuple[int, Cell]]) -> tuple[int, int]:
    """The longest sequence of the cells, and the largest batch."""
    return max(cell.context + cell.tokens for _, cell in cells), max(cell.batch for _, cell in cells)


def _forward_row(block: Block, work: Work, measured: float, predicted: float) -> Row:
    return Row(
        **block._asdict(),
        system=f"{work.rows} rows behind {work.context}",
        values={"rows": work.rows, "context": work.context, "measured": measured, "predicted": predicted},
    )


def _cell_row(block: Block, name: str, decoded: Decoded, text: Sequence[int], predicted: float) -> Row:
    return Row(
        **block._asdict(),
        system=name,
        tokens=len(decoded.text),
        decode_tokens=decoded.tokens,
        decode_seconds=decoded.seconds,
        same=decoded.text == tuple(text),
        values={"predicted": predicted, "tokens_per_step": decoded.tokens_per_step},
    )


if __name__ == "__main__":
    sys.exit(main())
