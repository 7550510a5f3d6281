"""Flags that say what the text must be."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager

from parlay.cli.opening import read_text
from parlay.types import StructuredOutputsParams


def add_structured_flags(parser: argparse.ArgumentParser) -> None:
    """At most one of these can be given."""
    group = parser.add_argument_group("structured output").add_mutually_exclusive_group()
    group.add_argument("--json-schema", metavar="FILE_OR_JSON", help="write JSON that follows this schema")
    group.add_argument("--regex", metavar="PATTERN", help="write text that matches this regular expression as a whole")
    group.add_argument(
        "--choice", action="append", metavar="TEXT", help="write one of these texts; give the flag once for each"
    )


def structured_outputs(options: argparse.Namespace) -> StructuredOutputsParams | None:
    """None where no such flag was given. Raises ValueError for a file that can't be read, or an empty text."""
    schema = None if options.json_schema is None else _schema(options.json_schema)
    if schema is None and options.regex is None and options.choice is None:
        return None
    return StructuredOutputsParams(json=schema, regex=options.regex, choice=options.choice)


def _schema(name: str) -> str:
    """Read a schema from a file, or from the flag itself. Raises ValueError that names it."""
    text = name if name.lstrip().startswith("{") else read_text(name, "schema")
    try:
        json.loads(text)
    except ValueError as error:
        raise ValueError(f"the schema {name} is not JSON: {error}") from None
    return text


@contextmanager
def naming_the_schema(options: argparse.Namespace) -> Iterator[None]:
    """Name the schema in an error that only the compiler of grammars can find."""
    try:
        yield
    except ValueError as error:
        if options.json_schema is None or not str(error).startswith("structured_outputs"):
            raise
        raise ValueError(f"the schema {options.json_schema} can't be used: {error}") from None
