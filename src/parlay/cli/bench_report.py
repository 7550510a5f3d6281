"""`parlay bench report`: a page, a table and plots of files of results."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_action(bench: argparse.ArgumentParser) -> None:
    """The word that turns measuring into reporting."""
    actions = bench.add_subparsers(title="actions", metavar="ACTION", dest="action")
    parser = actions.add_parser("report", help="make a page of results", description="Make a page of results.")
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="files that parlay bench wrote")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="where the report goes")
    parser.add_argument("--force", action="store_true", help="put different machines or versions into one report")
    parser.add_argument("--no-plots", action="store_true", help="tables only; needs no matplotlib")


def run(options: argparse.Namespace) -> int:
    from parlay.bench.report.write import write  # here, because it loads torch

    page, tables = write(options.results, options.output, force=options.force, plots=not options.no_plots)
    print(f"{page}\n{tables}")
    return 0
