"""What all benchmark commands share: the log, the file of results, the page made from it, and errors in one line."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from parlay.bench.provenance import ROOT, provenance
from parlay.bench.records import Results
from parlay.system import threads
from parlay.types import ParlayError

_WRONG_PATHS = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
RESULTS = ROOT / "benchmarks" / "results"


def show_log() -> None:
    """Show on the terminal what the benchmarks log."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")


def begin(options: argparse.Namespace) -> None:
    """Show the log and use ``--threads``."""
    show_log()
    threads.use(options.threads)


@contextmanager
def one_line_errors(name: str) -> Iterator[None]:
    """End the program with one line and exit status 1 if a model, a file or an option is wrong.

    ``name`` is the command's module.
    """
    try:
        yield
    except _WRONG_PATHS as error:
        sys.exit(f"benchmarks.{name}: {error.filename}: {error.strerror}")
    except (ValueError, ParlayError) as error:
        sys.exit(f"benchmarks.{name}: {error}")


def results_path(options: argparse.Namespace, stem: str) -> Path:
    """``--out``; without it STEM.jsonl, or STEM-quick.jsonl with ``--quick``."""
    out: Path = options.out or RESULTS / f"{stem}{'-quick' if options.quick else ''}.jsonl"
    return out


def open_results(
    options: argparse.Namespace, stem: str, command: str, more: Mapping[str, object] | None = None
) -> Results:
    """The file at `results_path`, which a run goes on with unless ``--fresh``; ``command`` and ``more`` are provenance.

    Raises ValueError for a file that holds other results.
    """
    return Results(results_path(options, stem), provenance(command, more), fresh=options.fresh)


def write_page(results: Path, text: str) -> None:
    """Return the path of the page: next to the results, as .md."""
    page = results.with_suffix(".md")
    page.write_text(text, encoding="utf-8")
    print(f"wrote {page}")
