"""Flags that prescribe the form of the text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager

from parlay.cli.opening import read_text
from parlay.cli.parser import unicode_text
from parlay.system.terminal import short
from parlay.types import ParlayError, StructuredOutputsParams


def add_structured_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; at most one can be given."""
    group = parser.add_argument_group("structured output").add_mutually_exclusive_group()
    group.add_argument(
        "--json-schema",
        metavar="FILE_OR_JSON",
        help="write JSON that follows this schema, given as it is ({...}, true or false) or as a file (any other text)",
    )
    group.add_argument(
        "--regex",
        type=unicode_text,
        metavar="PATTERN",
        help="write text that matches this regular expression as a whole",
    )
    group.add_argument(
        "--choice",
        action="append",
        type=unicode_text,
        metavar="TEXT",
        help="write one of these texts; give the flag once for each",
    )


def structured_outputs(options: argparse.Namespace) -> StructuredOutputsParams | None:
    """The form that the flags prescribe; None if none was given. Raises ValueError for an unreadable file or an empty
    text."""
    schema = None if options.json_schema is None else _schema(options.json_schema)
    if schema is None and options.regex is None and options.choice is None:
        return None
    with naming_the_form(options):
        return StructuredOutputsParams(json=schema, regex=options.regex, choice=options.choice)


def _schema(name: str) -> str:
    """Read a schema from a file, or from the flag itself. Raises ValueError that names the file."""
    itself = name.lstrip().startswith("{") or name.strip() in ("true", "false")
    text = name if itself else read_text(name, "schema")
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--json-schema {short(name)} is not JSON: {error}") from None
    return text


@contextmanager
def naming_the_form(options: argparse.Namespace) -> Iterator[None]:
    """Name the flag that was given, and a schema's file, in an error about the form of the text.

    Some errors are about the form as a whole, whose field has no flag of its own.
    """
    try:
        yield
    except ParlayError as error:
        flag = "--regex" if options.regex is not None else "--choice"
        name = flag if options.json_schema is None else f"--json-schema {short(options.json_schema)}"
        error.args = (error.named(lambda field: name if field.startswith("structured_outputs") else None, " "),)
        raise
