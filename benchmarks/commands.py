"""Helpers that all benchmark commands share: logging, the file of results and its page, and errors in one line."""

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
    """Show the benchmarks' log on the terminal."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")


def begin(options: argparse.Namespace) -> None:
    """Show the log, and use as many threads as ``--threads`` says."""
    show_log()
    threads.use(options.threads)


@contextmanager
def one_line_errors(name: str) -> Iterator[None]:
    """End the program with one line and exit status 1 if a model, a file or an option is wrong.

    ``name`` is the command's module under ``benchmarks``.
    """
    try:
        yield
    except _WRONG_PATHS as error:
        sys.exit(f"benchmarks.{name}: {error.filename}: {error.strerror}")
    except (ValueError, ParlayError) as error:
        sys.exit(f"benchmarks.{name}: {error}")


def results_path(options: argparse.Namespace, stem: str) -> Path:
    """Return ``--out``; without it STEM.jsonl, or STEM-quick.jsonl with ``--quick``."""
    out: Path = options.out or RESULTS / f"{stem}{'-quick' if options.quick else ''}.jsonl"
    return out


def open_results(
    options: argparse.Namespace, stem: str, command: str, more: Mapping[str, object] | None = None
) -> Results:
    """Open the file at `results_path`. A run continues it, unless ``--fresh`` is given.

    ``command`` and ``more`` are stored as provenance. Raises ValueError if the file holds other results.
    """
    return Results(results_path(options, stem), provenance(command, more), fresh=options.fresh)


def write_page(results: Path, text: str) -> None:
    """Write a page next to the results, as .md, and print its path."""
    page = results.with_suffix(".md")
    page.write_text(text, encoding="utf-8")
    print(f"wrote {page}")
