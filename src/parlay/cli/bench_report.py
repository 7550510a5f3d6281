"""`parlay bench report`: a page of tables, and a plot, of files of results."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(bench: argparse.ArgumentParser) -> None:
    group = bench.add_argument_group("report", "parlay bench report RESULTS ... -o DIR makes a page of results")
    group.add_argument("-o", "--output", type=Path, metavar="DIR", help="where the report goes")
    group.add_argument("--force", action="store_true", help="put different machines or versions into one report")
    group.add_argument("--no-plots", action="store_true", help="tables only; needs no matplotlib")


def refuse_without(options: argparse.Namespace) -> None:
    """Raises ValueError for a flag that means something to a report only."""
    for name in ("output", "force", "no_plots"):
        if vars(options)[name]:
            raise ValueError(f"--{name.replace('_', '-')} works only with parlay bench report")


def run(options: argparse.Namespace) -> int:
    results = options.files[1:]
    if not results or options.output is None:
        raise ValueError("parlay bench report needs RESULTS, files that parlay bench wrote, and --output DIR")
    from parlay.bench.report.write import write  # here, because it loads torch

    for path in write(results, options.output, force=options.force, plots=not options.no_plots):
        print(path)
    return 0
