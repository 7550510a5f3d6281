"""The command line. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 143 terminated.

Only the chosen command's module is imported, so that help and most usage errors come at once.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from types import FrameType
from typing import Literal, NoReturn, Protocol, TextIO

from parlay import __version__
from parlay.cli.other_programs import translated
from parlay.options import close_to, nearest

FAILURE, USAGE, INTERRUPTED, TERMINATED = 1, 2, 130, 143

COMMANDS = {
    "generate": "continue a prompt, and print the text as it is decoded",
    "suggest": "write several continuations to pick from, in the time of one",
    "chat": "chat with a model in the terminal",
    "run": "the same as chat --model MODEL",
    "serve": "serve models over HTTP, with OpenAI's, Anthropic's and Ollama's APIs",
    "gateway": "put one address in front of several servers: retries, and streams that outlive a server",
    "rank": "run one rank: one of several processes that run a model together",
    "demo": "race plain decoding against the default strategy, on a small model",
    "pull": "download a model",
    "models": "list the models on this machine",
    "rm": "remove a model that was pulled",
    "quantize": "write a model as a GGUF file in fewer bits",
    "prune": "write a smaller model without training it: zeros, narrower layers, fewer layers",
    "drafters": "list, add, share and compare trained drafters",
    "export": "write a trained drafter in the layout of another program",
    "bench": "find the best strategy for your prompts, or measure strategies on workloads",
    "score": "measure a model's perplexity on texts, and its accuracy on multiple-choice questions",
    "calibrate": "test how well lossy strategies answer your prompts, and certify those that answer well enough",
    "plan": "predict how fast a model would be on a machine, and which strategy to take",
    "simulate": "predict what a server or a fleet would do under given traffic: latencies, cost, failures",
    "strategies": "list the decoding strategies and their parameters",
    "router": "show or reset what auto has learned on this machine: how good drafters are, and what steps cost",
    "datastore": "make and inspect datastores: files of texts that a strategy drafts from",
    "ngram": "build n-gram language models, score texts with them, write by them",
    "train": "train a language model or a draft head",
    "completion": "print a script that completes commands and flags in a shell",
}
"""Each is the module of that name here, a `Command`."""


class Terminated(KeyboardInterrupt):
    """SIGTERM: an interrupt after which the program ends in any case."""


class Command(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int:
        """Do it and return the exit code. ParlayError and our own ValueErrors become one line."""
        ...


class Parser(argparse.ArgumentParser):
    """Reports a usage error in one line, and takes no abbreviated flags, so that new flags break no script."""

    def __init__(self, prog: str, description: str, color: object = None) -> None:  # color: from Python 3.14
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse a command line, flags of llama.cpp and vLLM included; an unknown flag's error names the closest one."""
        self._refuse_early_flag(words)
        found, extra = self.parse_known_args(translated(words, self._option_string_actions, self.prog))
        if extra:
            parser = next((part for name, part in self._subcommands() if name in vars(found).values()), self)
            flags = [word.partition("=")[0] for word in extra if word.startswith("--")]
            hint = close_to(flags[0], parser._option_string_actions) if flags else ""
            parser.error(f"{_unknown(extra)}{hint and f': {hint}'}")
        return found

    def _refuse_early_flag(self, words: Sequence[str]) -> None:
        """Where there are subcommands, argparse would take the word after a flag that is not known for one of them."""
        parts = dict(self._subcommands())
        first = words[0].partition("=")[0] if words else ""
        if not parts or not first.startswith("--") or first in self._option_string_actions:
            return
        homes = [name for name, part in parts.items() if first in part._option_string_actions]
        if not homes:
            hint = close_to(first, self._option_string_actions)
            self.error(f"{_unknown([first])}{hint and f': {hint}'}")
        home = next((name for name in homes if name in words), homes[0])
        usual = " ".join(word for word in words if word != home)
        self.error(f"{first} stands after the subcommand: {self.prog} {home} {usual}")

    def _subcommands(self) -> Iterator[tuple[str, argparse.ArgumentParser]]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from action.choices.items()

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"parlay: error: {self._plain(message)} (see {self.prog} --help)\n")

    def _plain(self, message: str) -> str:
        """Say argparse's own messages in the form that all others have: value, limit, remedy."""
        if choice := _CHOICE.fullmatch(message):
            names = [name.strip(" '") for name in choice[3].split(",")]
            return f"{choice[1]} {choice[2]}: {nearest(choice[2], names)}"
        for pattern, words in _ARGPARSE:
            message = pattern.sub(words, message)
        parts = [name for name, _ in self._subcommands()]
        return f"{message}: choose one of {', '.join(parts)}" if parts and message.endswith("is missing") else message


_CHOICE = re.compile(r"argument (\S+): invalid choice: '?(.*?)'? \(choose from (.*)\)")
_ARGPARSE = [
    (re.compile(pattern), words)
    for pattern, words in (
        (r"argument (\S+?)(?:/\S+)?: invalid int value: '(.*)'", r"\1 \2: give a whole number"),
        (r"argument (\S+?)(?:/\S+)?: invalid float value: '(.*)'", r"\1 \2: give a number"),
        (r"argument (\S+?)(?:/\S+)?: expected one argument", r"\1 needs a value"),
        (r"argument (\S+): not allowed with argument (\S+)", r"\1 does not go with \2: leave out one of them"),
        (r"the following arguments are required: (.*)", r"\1 is missing"),
        (r"argument (?:--strategy|--exactness): ", ""),
    )
]


def _unknown(words: Sequence[str]) -> str:
    """Name a flag that no command line of the parser has, or words that are too many."""
    if words[0].startswith("-"):
        return f"there is no flag {words[0].partition('=')[0]}"
    return f"{' '.join(words)}: more words than the command takes; put a text of several words into quotes"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, by default the process's own, and return the exit code; argparse may exit instead."""
    if arguments is not None:
        return guarded(lambda: _dispatch(list(arguments)))
    for each in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(each) != signal.SIG_IGN:  # as jobs in the background of a shell have the first one
            signal.signal(each, _interrupt)
    try:
        return guarded(lambda: _dispatch(sys.argv[1:]))
    finally:
        for each in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(each) is _interrupt:  # a server has left another
                signal.signal(each, signal.SIG_DFL)  # the end of Python would print a traceback


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """End at once amid an import, where libraries lose the exception, or abort with a dump of memory."""
    error = Terminated() if signum == signal.SIGTERM else KeyboardInterrupt()
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            os._exit(_code_of(error))
        frame = frame.f_back
    raise error


def _code_of(interrupt: KeyboardInterrupt) -> int:
    return TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED


def guarded(command: Callable[[], int]) -> int:
    """Call a command and return the exit code; an error that a user can act on becomes one line."""
    _open_streams()
    _forgive_output()
    try:
        return _written(command)
    except KeyboardInterrupt as interrupt:
        return _code_of(interrupt)
    except BrokenPipeError:  # the reader is gone, `parlay ... | head` say
        drop_output()
        return FAILURE
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11 wraps it where a class is made: at imports
            return _code_of(error.__cause__)
        if said := _refusal_of_system(error):
            print(f"parlay: error: {said}", file=sys.stderr)
            return FAILURE
        mistake = _users_mistake(error)
        if mistake is None:
            raise
        from parlay.system.terminal import printable  # here, because it loads torch

        print(f"parlay: error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        return mistake
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # which was told, or is not what went wrong
            drop_output()


def _written(command: Callable[[], int]) -> int:
    """Call a command, and write what waits to be written while a full disk still is an error of one line."""
    try:
        code = command()
    except SystemExit:  # argparse's way out, after help say
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return code


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR}
_LONGEST_NAME = 80


def _refusal_of_system(error: Exception) -> str:
    """Say what the system refuses, in one line: a full disk, or a path that the user may not have, or that is none.

    Empty for anything else. What waits to be written to a full disk is dropped.
    """
    if not isinstance(error, OSError):
        return ""
    if error.errno in _FULL:
        drop_output()
        return f"can't write {error.filename or 'the output'}: {error.strerror}"
    if error.errno not in _REFUSED or error.filename is None:
        return ""
    name = " ".join(str(error.filename).split())
    return f"can't use {name[:_LONGEST_NAME]}{'...' * (len(name) > _LONGEST_NAME)}: {error.strerror}"


def drop_output() -> None:
    """Send what waits to be written nowhere: Python would complain when it flushes that at exit."""
    with suppress(OSError):  # who calls `main` may have put something without a descriptor there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(words: list[str]) -> int:
    if not words or words[0] not in COMMANDS:
        return _top_level(words)
    command: Command = import_module(f"parlay.cli.{words[0]}")
    return command.run(parser_of(words[0]).parse(words[1:]))


def parser_of(name: str) -> Parser:
    """Make the parser of a command. Raises ParlayError if the command needs a package that is not installed."""
    command: Command = import_module(f"parlay.cli.{name}")
    summary = COMMANDS[name]
    parser = Parser(f"parlay {name}", f"{summary[0].upper()}{summary[1:]}.")
    command.add_arguments(parser)
    return parser


def _top_level(words: list[str]) -> int:
    parser = Parser("parlay", "Parallel decoding for LLMs: several tokens per forward pass, the same text.")
    parser.add_argument("--version", action="version", version=f"parlay {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=argparse.ArgumentParser)
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary)
    parser.epilog = "`parlay COMMAND --help` lists a command's options."
    if words and not words[0].startswith("-"):
        parser.error(f"there is no command {words[0]}: {nearest(words[0], COMMANDS)}")
    if words and words[0] not in parser._option_string_actions:
        parser.error(f"a command comes before the flags, as in parlay generate {' '.join(words)}")
    parser.parse(words)
    parser.print_help()
    return 0


def _users_mistake(error: Exception) -> int | None:
    """The exit code of an error that its message explains to a user; None for a bug, which keeps its traceback."""
    from parlay.types import ParlayError  # here, because it loads torch

    if isinstance(error, ValueError) and (isinstance(error, ParlayError) or _raised_here(error)):
        return USAGE
    return FAILURE if isinstance(error, ParlayError) else None


def _raised_here(error: Exception) -> bool:
    """Whether a line of ours raised it: a library's ValueError that reaches us is a bug of ours."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("parlay.")


def _open_streams() -> None:
    """Put the null device where the shell closed a stream, as `<&-` does.

    Otherwise the next file that is opened would have its number, and what others write or read there.
    """
    sys.stdin = sys.stdin or _null("r")
    sys.stdout = sys.stdout or _null("w")
    sys.stderr = sys.stderr or _null("w")


def _null(mode: Literal["r", "w"]) -> TextIO:
    return os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8")


def _forgive_output() -> None:
    """A terminal that can't show a character shows a question mark instead of ending the run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
