"""Command-line flags made from the fields of `TrainOptions`, so that one field is flag, default and help."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from pathlib import Path

from parlay.train.lm import TrainOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one flag per field; a field without a default is required."""
    types = typing.get_type_hints(TrainOptions)
    for option in dataclasses.fields(TrainOptions):
        flag, text = f"--{option.name.replace('_', '-')}", option.metadata["help"]
        required = option.default is dataclasses.MISSING
        default = None if required else option.default
        kind = types[option.name]
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)
            continue
        convert = Path if kind in (Path, Path | None) else kind
        choices = option.metadata.get("choices")
        parser.add_argument(flag, type=convert, default=default, required=required, choices=choices, help=text)


def options_from(arguments: argparse.Namespace) -> TrainOptions:
    """The options that parsed arguments stand for; other attributes of ``arguments`` are left alone.

    Raises:
        ValueError: for values that the options refuse.
    """
    values = vars(arguments)
    return TrainOptions(**{option.name: values[option.name] for option in dataclasses.fields(TrainOptions)})
