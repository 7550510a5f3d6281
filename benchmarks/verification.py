"""What a forward costs by its rows, behind short and long texts, on the built-in model widened to 100 M parameters.

    python -m benchmarks.verification

Rows are a chain of drafted tokens. All row counts are timed in turn in each pass, so that a ratio to one row is one of
the same seconds. The model was not trained on texts this long: only its costs are real there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.figures.report import about, table
from benchmarks.figures.setup import FULL, WIDE, Setup
from benchmarks.options import add_cache_flag, add_threads_flag
from parlay import models
from parlay.bench.forwards import measure
from parlay.bench.provenance import ROOT, provenance
from parlay.bench.records import Results, Row

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (256, 4096, 16384)
PASSES = 9
WIDTHS: dict[str, str | None] = {"bfloat16": None, "int8": "int8"}
GOALS = "goals: 8 rows at most 1.25 times one row, 16 at most 1.5, at 256 tokens in bfloat16"


def longer(folder: Path, made: Path, context: int) -> Path:
    """The checkpoint with room for so many tokens."""
    shutil.copytree(folder, made)
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = context
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


def times(rows: Iterable[Row]) -> dict[str, dict[int, dict[int, list[float]]]]:
    """Seconds of each pass by width of the weights, context and rows."""
    found: dict[str, dict[int, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in rows:
        if row.steps:
            found[row.cell.model][row.cell.context][row.tokens].append(row.seconds)
    return found


def lines(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Milliseconds of one row, and for the others the median over passes of the ratio to it."""
    for width, by_context in times(rows).items():
        for context, by_rows in by_context.items():
            one = by_rows[1]
            ratios = (
                statistics.median(many / single for many, single in zip(by_rows[count], one, strict=True))
                for count in ROWS[1:]
            )
            yield width, str(context), f"{1e3 * statistics.median(one):.1f}", *(f"{ratio:.2f}" for ratio in ratios)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verification", description=__doc__)
    add_threads_flag(parser)
    add_cache_flag(parser)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="N")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "verification.jsonl", metavar="FILE"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    record = provenance("python -m benchmarks.verification")
    results = Results(options.out, record, fresh=True)
    longest = max(options.contexts) + max(ROWS)
    with tempfile.TemporaryDirectory() as folder:
        wide = Setup(data=None, cache=options.cache, scale=FULL).directory(WIDE)
        checkpoint = longer(wide, Path(folder) / WIDE, longest)
        for name, quantize in WIDTHS.items():
            runner = models.load(str(checkpoint), dtype="bfloat16", quantize=quantize, cache_tokens=2 * longest)
            results.add([*measure(runner, name, ROWS, options.contexts, PASSES)])
    head = ("weights", "context", "ms of 1 row", *(f"{count} rows" for count in ROWS[1:]))
    title = ["# What verifying costs", "", f"{WIDE}, times the forward of one row; {GOALS}.", ""]
    text = "\n".join([*title, about(record)[0], "", *table(head, [list(line) for line in lines(results.rows)])])
    options.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
