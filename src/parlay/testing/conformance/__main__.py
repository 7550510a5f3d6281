"""`python -m parlay.testing.conformance [STRATEGY ...]`: run the kit, print and save the results."""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from parlay.testing.conformance import LONG, SHORT, KitLength, Report, catalogue_specs, default_stages
from parlay.testing.conformance.side_by_side import run
from parlay.types import ParlayError


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit status 0 if every strategy passed, 1 if one failed, and 2 if one does not exist."""
    parser = argparse.ArgumentParser(prog="python -m parlay.testing.conformance", description=__doc__)
    parser.add_argument("strategies", nargs="*", metavar="STRATEGY", help="default: every entry of the catalogue")
    parser.add_argument("--long", action="store_true", help=f"{LONG.tokens} tokens and {LONG.draws} draws")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the result there as Markdown")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="strategies tested side by side")
    options = parser.parse_args(arguments)
    effort = LONG if options.long else SHORT
    reports: list[Report] = []
    try:
        for report in run(options.strategies or catalogue_specs(), effort, options.processes):
            reports.append(report)
            print(report, flush=True)
    except ParlayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.write:
        options.write.write_text(as_markdown(reports, effort), encoding="utf-8")
    return 0 if all(report.passed for report in reports) else 1


def as_markdown(reports: Iterable[Report], effort: KitLength) -> str:
    """Write one line per strategy and one column per stage: checks passed of checks run. Notes below list failures and
    excused differences."""
    stages = list(default_stages())
    lines = [
        "# Conformance: the last run",
        "",
        "`make conformance` wrote this page. Each cell shows the checks that passed, of those that ran. Every token is "
        "compared with the slow reference decoder.",
        "",
        f"The run of {datetime.date.today().isoformat()} had {effort.tokens} tokens per long text and {effort.draws} "
        f"draws per distribution. It used parlay {version('parlay')}, torch {torch.__version__}, "
        f"transformers {version('transformers')} and Python {platform.python_version()}, on {platform.machine()} with "
        f"{torch.backends.cpu.get_cpu_capability()}.",
        "",
        "| strategy | " + " | ".join(stages) + " | seconds |",
        "| --- |" + " --- |" * (len(stages) + 1),
    ]
    for report in reports:
        cells = [_cell(report, stage) for stage in stages]
        seconds = sum(finding.seconds for finding in report.findings)
        lines.append(f"| `{report.subject}` | {' | '.join(cells)} | {seconds:.0f} |")
    notes = [(report.subject, finding) for report in reports for finding in report.findings if finding.detail]
    lines += ["", *(f"- `{subject}`: {finding}" for subject, finding in notes)] if notes else []
    return "\n".join(lines) + "\n"


def _cell(report: Report, stage: str) -> str:
    here = [finding for finding in report.findings if finding.stage == stage]
    return f"{sum(finding.passed for finding in here)}/{len(here)}"


if __name__ == "__main__":
    sys.exit(main())
