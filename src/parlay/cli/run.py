"""`parlay run MODEL`: `parlay chat --model MODEL`."""

from __future__ import annotations

import argparse

from parlay.cli import chat
from parlay.cli.flags import add_loading_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="as chat's --model, say smollm2-135m or a GGUF file")
    add_loading_flags(parser)
    chat.add_flags(parser)


run = chat.run
