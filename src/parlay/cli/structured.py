"""Flags that say what the text must be."""

from __future__ import annotations

import argparse

from parlay.cli.files import read_text
from parlay.types import StructuredOutputsParams


def add_structured_flags(parser: argparse.ArgumentParser) -> None:
    """At most one of these can be given."""
    group = parser.add_argument_group("structured output").add_mutually_exclusive_group()
    group.add_argument("--json-schema", metavar="FILE", help="write JSON that follows the schema in this file")
    group.add_argument("--regex", metavar="PATTERN", help="write text that matches this regular expression as a whole")
    group.add_argument(
        "--choice", action="append", metavar="TEXT", help="write one of these texts; give the flag once for each"
    )


def structured_outputs(options: argparse.Namespace) -> StructuredOutputsParams | None:
    """None where no such flag was given. Raises ValueError for a file that can't be read, or an empty text."""
    schema = None if options.json_schema is None else read_text(options.json_schema, "schema")
    if schema is None and options.regex is None and options.choice is None:
        return None
    return StructuredOutputsParams(json=schema, regex=options.regex, choice=options.choice)
