"""`parlay models`: the models on this machine."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON array")


def run(options: argparse.Namespace) -> int:
    from parlay.models.fetch.local_models import kept  # here, because help needs none of it

    found = kept()
    if options.json:
        rows = [
            {"name": each.name, "source": each.source, "bytes": each.size, "place": str(each.place)} for each in found
        ]
        print(json.dumps(rows))
        return 0
    width = max(len(each.name) for each in found)
    for each in found:
        print(f"{each.name:{width}}  {each.size / 1e6:8,.0f} MB  {each.source:8}  {each.place}")
    return 0
