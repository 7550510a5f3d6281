"""`parlay rm MODEL`: deletes a pulled model."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a name that parlay models lists")


def run(options: argparse.Namespace) -> int:
    from parlay.models.fetch.local_models import remove  # here, as help needs none of it

    model = remove(options.model)
    print(f"removed {model.name} ({model.size / 1e6:,.0f} MB) from {model.place}")
    return 0
