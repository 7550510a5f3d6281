"""`parlay models`: lists the models on this machine, or the families that run."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from pathlib import Path

from parlay.types import ParlayError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    parser.add_argument(
        "--families", action="store_true", help="list the families of models that run, and what runs each"
    )


def run(options: argparse.Namespace) -> int:
    if options.families:
        _print_families(options.json)
        return 0
    from parlay.models.facts import spell_parameters  # here, as help needs none of it
    from parlay.models.fetch.local_models import kept
    from parlay.system.terminal import shown

    found = kept()
    if options.json:
        rows = [
            {
                "name": each.name,
                "source": each.source,
                "bytes": each.size,
                "parameters": _parameters(each.files),
                "place": str(each.place),
                "end_tokens": _ends(each.files),
            }
            for each in found
        ]
        print(json.dumps(rows))
        return 0
    width = max(len(each.name) for each in found)
    for each in found:
        count = _parameters(each.files)
        size = spell_parameters(count) if count else ""
        line = f"{each.name:{width}}  {size:>8}  {each.size / 1e6:8,.0f} MB  {each.source:8}  {each.place}"
        print(shown(line, sys.stdout))  # others name folders and tokens
        ends = _ends(each.files)
        if ends:
            print(shown(f"{'':{width}}  ends at {' '.join(ends)}", sys.stdout))
    return 0


def _print_families(as_json: bool) -> None:
    from parlay.models.families.listing import listing

    rows = listing()
    if as_json:
        print(json.dumps([row._asdict() for row in rows]))
        return
    width = max(len(row.architecture) for row in rows)
    for row in rows:
        gguf = f"GGUF {', '.join(row.gguf)}" if row.gguf else ""
        print(f"{row.architecture:{width}}  {'; '.join(filter(None, (row.models, row.runs_in, gguf, row.note)))}")


def _parameters(files: Path) -> int | None:
    """The number of the model's parameters; None if its files can't be read."""
    from parlay.models.facts import count_parameters

    with suppress(ParlayError, OSError):
        return count_parameters(files)
    return None


def _ends(files: Path) -> list[str]:
    """The model's end-of-text tokens; empty if its files can't be read."""
    from parlay.llm.vocabulary import ends_of

    with suppress(ParlayError, OSError):
        return ends_of(str(files))
    return []
