"""Write the reference of the command line as Markdown: `python docs/site/cli_reference.py` prints it.

A hook of the site calls ``reference()`` with ``src`` on the path: a section for each command and subcommand, and in it
a table for each group of flags. Loading `parlay train` imports torch, so one call takes some seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from parlay.cli import parser_of
from parlay.cli.commands import COMMANDS
from parlay.cli.parser import Parser


def reference(level: int = 2) -> str:
    """All commands. ``level``: of the commands' headings."""
    return "\n".join(line for name in COMMANDS for line in _command(parser_of(name), level))


def _command(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    if isinstance(parser, Parser):
        parser.fill()
    yield f"{'#' * level} {parser.prog}\n\n{parser.description or ''}\n"
    places = [_name(action) for action in parser._actions if not action.option_strings]
    yield f"```text\n{' '.join([parser.prog, '[FLAGS]', *places])}\n```\n"
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if not _is_hidden(action)]
        if actions:
            yield from _table(group.title or "", group.description or "", actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                yield from _command(part, level + 1)


def _table(title: str, note: str, actions: list[argparse.Action]) -> Iterator[str]:
    yield f"**{title[0].upper()}{title[1:]}**{f': {note}' if note else ''}\n"
    yield "| flag | meaning |\n|---|---|"
    for action in actions:
        help = (action.help or "") % {"default": action.default, "prog": "parlay"}
        choices = "" if action.metavar is None or not action.choices else f" ({', '.join(map(str, action.choices))})"
        yield f"| `{_cell(_name(action))}` | {_cell(help + choices)} |"
    yield ""


def _is_hidden(action: argparse.Action) -> bool:
    skipped = isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    return skipped or action.help == argparse.SUPPRESS


def _name(action: argparse.Action) -> str:
    """The flag in all its spellings with what stands for its value, or the argument's name."""
    if isinstance(action, argparse._SubParsersAction):
        return str(action.metavar)
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    value = "" if action.nargs == 0 else str(action.metavar or choices or action.dest.upper())
    return ", ".join(
        filter(None, [*action.option_strings[:-1], " ".join([*action.option_strings[-1:], value]).strip()])
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(reference())
