"""`parlay completion SHELL`: prints the script with which a shell completes commands, flags and names."""

from __future__ import annotations

import argparse
from contextlib import suppress
from importlib import import_module

from parlay.cli import Command
from parlay.cli.commands import COMMANDS
from parlay.cli.parser import Parser
from parlay.types import ParlayError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell that will read the script")


def run(options: argparse.Namespace) -> int:
    """Print the script. Raises ParlayError if the package that writes it is missing."""
    try:
        import shtab
    except ModuleNotFoundError:
        raise ParlayError("shell completion needs shtab: run pip install 'parlay[completion]'") from None
    print(shtab.complete(_whole(), options.shell))
    return 0


def _whole() -> argparse.ArgumentParser:
    """A parser of all commands; usually only one command's is made."""
    parser = argparse.ArgumentParser("parlay")
    commands = parser.add_subparsers()
    for name, summary in COMMANDS.items():
        with suppress(ParlayError):  # a command that needs a missing package
            command: Command = import_module(f"parlay.cli.{name}")
            command.add_arguments(commands.add_parser(name, help=summary))
    _offer_strategies(parser)
    return parser


def _offer_strategies(parser: argparse.ArgumentParser) -> None:
    """Complete the names of strategies after each ``--strategy``. The flag itself has no choices, as options may follow
    a name."""
    from parlay.strategies.catalogue import catalogue

    if isinstance(parser, Parser):
        parser.fill()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                _offer_strategies(part)
        elif "--strategy" in action.option_strings:
            action.choices = tuple(catalogue())
