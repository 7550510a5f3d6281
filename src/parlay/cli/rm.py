"""`parlay rm MODEL`: deletes a pulled model."""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a name that parlay models lists")


def run(options: argparse.Namespace) -> int:
    from parlay.models.fetch.local_models import remove  # here, as help needs none of it
    from parlay.system.terminal import shown

    model = remove(options.model)
    print(shown(f"removed {model.name} ({model.size / 1e6:,.0f} MB) from {model.place}", sys.stdout))
    return 0
