"""Flags that the benchmarks' commands share."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "parlay-benchmarks"
_COMMAND = re.compile(r"(python|parlay|pip|PYTHON\w*=\S*) ")
QUICK = "use few prompts and short answers, to see that it works"


class _Lines(argparse.HelpFormatter):
    """Wraps each paragraph of a description by itself, and keeps the lines of commands."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = [
            part if _COMMAND.match(part.lstrip()) else super(_Lines, self)._fill_text(part, width, indent)
            for part in text.strip().split("\n\n")
        ]
        return "\n\n".join(parts)


class CommandParser(argparse.ArgumentParser):
    """A parser that reports an error in one line. It checks before measuring that ``--out`` can be written."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        found = super().parse_args(args, namespace)
        out = vars(found).get("out")
        if isinstance(out, Path) and (refusal := _refusal(out)):
            self.error(f"--out {out}: {refusal}")
        return found


def _refusal(out: Path) -> str:
    """Return why no file can be written at a path; empty if one can. The path's folder is made if necessary."""
    if out.is_dir():
        return "it is a folder: name a file"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"can't make its folder: {error.strerror}"
    place = out if out.exists() else out.parent
    return "" if os.access(place, os.W_OK) else "can't be written"


def command_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Make the parser of ``python -m benchmarks.MODULE``, described by the module's docstring."""
    return CommandParser(prog=f"python -m benchmarks.{module}", description=description, formatter_class=_Lines)


def add_run_flags(parser: argparse.ArgumentParser, *, quick: str = QUICK) -> None:
    """Add the flags of a command that continues a file of results: ``quick``, ``fresh``, ``out``, ``threads``,
    ``cache``."""
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--fresh", action="store_true", help="overwrite the file of results instead of continuing it")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file of results; the tables are written beside it, as .md"
    )
    add_threads_flag(parser)
    add_cache_flag(parser)


def add_threads_flag(parser: argparse.ArgumentParser, default: int = 2) -> None:
    """Add ``threads``: every system that is compared uses as many."""
    parser.add_argument("--threads", type=int, default=default, help=f"threads of torch (default: {default})")


def add_cache_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``cache``: the folder of models that take long to make."""
    parser.add_argument(
        "--cache", type=Path, default=CACHE, metavar="DIR", help=f"folder of the models made (default: {CACHE})"
    )


def add_study_flags(
    parser: argparse.ArgumentParser, *, data: str, many: str, count: int, tokens: int, of: str, minutes: float = 60.0
) -> None:
    """Add the flags of a study of many cases: ``data``, ``model``, ``minutes``, the number of cases, ``max_tokens``.

    Times are CPU time of one thread, on which other work counts little. ``data`` names the part of the folder that is
    read, ``many`` the cases, and ``of`` what ``tokens`` limits.
    """
    parser.set_defaults(threads=1)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help=f"folder that holds {data}")
    parser.add_argument("--model", required=True, help="the model")
    parser.add_argument(
        "--minutes", type=float, default=minutes, metavar="N", help=f"stop after this time (default: {minutes:g})"
    )
    parser.add_argument(f"--{many}", type=int, default=count, metavar="N", help=f"number of {many} (default: {count})")
    parser.add_argument(
        "--max-tokens", type=int, default=tokens, metavar="N", help=f"most tokens of {of} (default: {tokens})"
    )
