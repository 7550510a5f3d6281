"""The flags that the benchmarks' commands share."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "parlay-benchmarks"
_COMMAND = re.compile(r"(python|parlay|pip|PYTHON\w*=\S*) ")
QUICK = "few prompts, short answers: to see that it works"


class _Lines(argparse.HelpFormatter):
    """Folds each paragraph of a description by itself, and keeps the lines of commands."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = [
            part if _COMMAND.match(part) else super(_Lines, self)._fill_text(part, width, indent)
            for part in text.strip().split("\n\n")
        ]
        return "\n\n".join(parts)


def command_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of ``python -m benchmarks.MODULE``, described by the module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}", description=description, formatter_class=_Lines
    )


def add_run_flags(parser: argparse.ArgumentParser, *, quick: str = QUICK) -> None:
    """For a command that goes on with a file of results: ``quick``, ``fresh``, ``out``, ``threads``, ``cache``."""
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--fresh", action="store_true", help="start the file anew instead of going on with it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="results; the tables go beside it, as .md")
    add_threads_flag(parser)
    add_cache_flag(parser)


def add_threads_flag(parser: argparse.ArgumentParser, default: int = 2) -> None:
    """``threads``: the same for every system that is compared."""
    parser.add_argument("--threads", type=int, default=default, help=f"threads of torch (default: {default})")


def add_cache_flag(parser: argparse.ArgumentParser) -> None:
    """``cache``: a directory of what is expensive to make."""
    parser.add_argument(
        "--cache", type=Path, default=CACHE, metavar="DIR", help=f"keeps models made (default: {CACHE})"
    )


def add_study_flags(
    parser: argparse.ArgumentParser, *, data: str, many: str, count: int, tokens: int, of: str, minutes: float = 60.0
) -> None:
    """For a study of ``many`` cases, one after another: ``data``, ``model``, ``minutes``, how many, ``max_tokens``.

    Times are processor time of one thread, on which other work counts little. ``data`` names the folder's part that is
    read, and ``of`` what is as long as ``tokens``.
    """
    parser.set_defaults(threads=1)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help=f"folder that holds {data}")
    parser.add_argument("--model", required=True, help="the model")
    parser.add_argument(
        "--minutes", type=float, default=minutes, metavar="N", help=f"stop after so long (default: {minutes:g})"
    )
    parser.add_argument(f"--{many}", type=int, default=count, metavar="N", help=f"how many (default: {count})")
    parser.add_argument("--max-tokens", type=int, default=tokens, metavar="N", help=f"of {of} (default: {tokens})")
