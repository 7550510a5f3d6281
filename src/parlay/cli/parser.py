"""Parses command lines: usage errors take one line, and help comes short or complete."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from parlay.cli.other_programs import translated
from parlay.options import close_to, nearest

USAGE = 2


def unicode_text(text: str) -> str:
    """Parse a flag's text. Raises ArgumentTypeError for lone surrogates, which stand for bytes of the command line that
    are not text in the locale's encoding."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("must be valid Unicode text") from None
    return text


class _ShortHelp(argparse._HelpAction):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, Parser)
        parser._print_message(parser.short_help(), sys.stdout)
        parser.exit()


def _spelled(action: argparse.Action) -> str:
    """An argument as the usage line shows it; empty for an optional flag."""
    name = str(action.metavar or action.dest.upper())
    if action.option_strings:
        return f"{action.option_strings[0]} {name}" if action.required else ""
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]"}.get(str(action.nargs), name)


class Parser(argparse.ArgumentParser):
    """Reports usage errors in one line, and accepts no abbreviated flags, so that new flags break no script."""

    def __init__(
        self, prog: str, description: str, color: object = None, *, everyday: Collection[str] = ()
    ) -> None:  # Python 3.14 passes color
        """``everyday`` are the flags that ``-h`` shows; if empty, ``-h`` equals ``--help``."""
        super().__init__(prog=prog, description=description, allow_abbrev=False, add_help=not everyday)
        self._everyday = frozenset(everyday)
        self._later: Callable[[argparse.ArgumentParser], object] | None = None
        if everyday:
            self.add_argument("-h", action=_ShortHelp, help="show the options that most people need")
            self.add_argument("--help", action="help", help="show all options")

    def add_later(self, add: Callable[[argparse.ArgumentParser], object]) -> None:
        """Have ``add`` add arguments when they are first needed, as it may import much."""
        self._later = add

    def fill(self) -> None:
        """Add the arguments that were to come later."""
        add, self._later = self._later, None
        if add is not None:
            add(self)

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self.fill()
        return super().parse_known_args(args, namespace)

    def short_help(self) -> str:
        """The help of the most useful flags, with a hint at the rest."""
        shown = [action for action in self._actions if not self._everyday.isdisjoint(action.option_strings)]
        places = [action for action in self._actions if not action.option_strings]
        formatter = self._get_formatter()
        formatter.add_usage(" ".join(filter(None, [self.prog, "[OPTIONS]", *map(_spelled, [*shown, *places])])), [], [])
        formatter.add_text(self.description)
        for title, actions in (("positional arguments", places), ("options", shown)):
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        flags = sum(bool(action.option_strings) and action.help != argparse.SUPPRESS for action in self._actions)
        formatter.add_text(f"{self.prog} --help lists all {flags} options.")
        return formatter.format_help()

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse a command line, including flags of llama.cpp and vLLM; an error for an unknown flag names the closest
        one."""
        self._refuse_early_flag(words)
        found = argparse.Namespace()
        _, extra = self.parse_known_args(translated(words, self._option_string_actions, self.prog), found)
        if extra:
            parts = self._subcommands()
            parser = next((part for name, part in parts.items() if name in vars(found).values()), self)
            flags = [word.partition("=")[0] for word in extra if word.startswith("--")]
            hint = close_to(flags[0], parser._option_string_actions) if flags else ""
            parser.error(f"{_unknown(extra)}{hint and f': {hint}'}")
        return found

    def flag_of(self, field: str, found: argparse.Namespace) -> str | None:
        """The flag that sets a field, of this parser or of the subcommand that ``found`` chooses; None if none does.

        Both ``vote.by`` and ``vote by`` are the field of ``--vote-by``, and ``whole=False`` is that of ``--no-whole``.
        """
        name, _, value = re.sub("[. ]", "_", field).partition("=")
        parts, chosen = self._subcommands(), vars(found).values()
        actions = [*self._actions, *(each for part in parts if part in chosen for each in parts[part]._actions)]
        flags = next((each.option_strings for each in actions if each.dest == name and each.option_strings), None)
        return None if flags is None else flags[-1 if value == "False" else 0]

    def _refuse_early_flag(self, words: Sequence[str]) -> None:
        """Report an unknown flag before a subcommand; argparse would take the flag's value for the subcommand."""
        parts = self._subcommands()
        first = words[0].partition("=")[0] if words else ""
        if not parts or not first.startswith("--") or first in self._option_string_actions:
            return
        for part in parts.values():
            part.fill()
        homes = [name for name, part in parts.items() if first in part._option_string_actions]
        if not homes:
            hint = close_to(first, self._option_string_actions)
            self.error(f"{_unknown([first])}{hint and f': {hint}'}")
        home = next((name for name in homes if name in words), homes[0])
        usual = " ".join(word for word in words if word != home)
        self.error(f"{first} must come after the subcommand: {self.prog} {home} {usual}")

    def _subcommands(self) -> Mapping[str, Parser]:
        """The subcommands' parsers by name."""
        found = (action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction))
        return next(found, {})

    def error(self, message: str) -> NoReturn:
        from parlay.system.terminal import printable  # here, as it imports torch

        self.exit(USAGE, f"parlay: error: {printable(self._plain(message))} (see {self.prog} --help)\n")

    def _plain(self, message: str) -> str:
        """Rewrite argparse's messages to our form: value, limit, remedy."""
        if choice := _CHOICE.fullmatch(message):
            names = [name.strip(" '") for name in choice[3].split(",")]
            return f"{choice[1]} {choice[2]}: {nearest(choice[2], names)}"
        for pattern, words in _ARGPARSE:
            message = pattern.sub(words, message)
        parts = ", ".join(self._subcommands())
        return f"{message}: choose one of {parts}" if parts and message.endswith("is missing") else message


_CHOICE = re.compile(r"argument (\S+): invalid choice: '?(.*?)'? \(choose from (.*)\)")
_ARGPARSE = [
    (re.compile(pattern), words)
    for pattern, words in (
        (r"argument (\S+?)(?:/\S+)?: invalid int value: '(.*)'", r"\1 must be a whole number, got \2"),
        (r"argument (\S+?)(?:/\S+)?: invalid float value: '(.*)'", r"\1 must be a number, got \2"),
        (r"argument (\S+?)(?:/\S+)?: expected one argument", r"\1 needs a value"),
        (r"argument (\S+): not allowed with argument (\S+)", r"\1 can't be used with \2: remove one of them"),
        (r"the following arguments are required: (.*)", r"\1 is missing"),
        (r"argument (?:--strategy|--exactness): ", ""),
        (r"argument (\S+?)(?:/\S+)?: must ", r"\1 must "),
        (r"argument (\S+?)(?:/\S+)?: ", r"\1: "),
    )
]


def _unknown(words: Sequence[str]) -> str:
    """The error for an unknown flag or for too many words."""
    if words[0].startswith("-"):
        return f"there is no flag {words[0].partition('=')[0]}"
    return f"{' '.join(words)}: more words than the command expects: put a text of several words into quotes"


_AnyParser = TypeVar("_AnyParser", bound=argparse.ArgumentParser)


def add_action(actions: argparse._SubParsersAction[_AnyParser], name: str, summary: str) -> _AnyParser:
    """Add a subcommand; its description is the summary as a sentence."""
    return actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
