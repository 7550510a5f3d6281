"""The flags of `parlay train lm` and the options are one thing."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from parlay.cli.flags import add_option_flags, options_from
from parlay.train.lm import TrainOptions


def parse(*argv: str) -> TrainOptions:
    """Options from a command line."""
    parser = argparse.ArgumentParser()
    add_option_flags(parser, TrainOptions)
    return options_from(TrainOptions, parser.parse_args(argv))


def test_defaults_are_those_of_the_options() -> None:
    assert parse("--data", "d") == TrainOptions(data=Path("d"))


def test_every_flag_reaches_its_option() -> None:
    options = parse(
        "--data", "d", "--teacher", "t", "--hours", "0.5", "--no-compile", "--resume", "--batch-tokens", "64"
    )
    assert options.teacher == Path("t")
    assert (options.hours, options.compile, options.resume, options.batch_tokens) == (0.5, False, True, 64)


def test_data_is_required() -> None:
    with pytest.raises(SystemExit):
        parse()
