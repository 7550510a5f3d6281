"""The command line. Exit codes: 0 success, 1 failure, 2 wrong usage, 130 SIGINT, 143 SIGTERM, 129 SIGHUP.

Only the chosen command's module is imported, so help and most usage errors appear at once.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from types import FrameType
from typing import Literal, Protocol, TextIO

from parlay import __version__
from parlay.cli.commands import COMMANDS, ELSEWHERE, EVERYDAY, GROUPS
from parlay.cli.parser import USAGE, Parser
from parlay.options import nearest

FAILURE, INTERRUPTED = 1, 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """Raised at SIGTERM, or at SIGHUP when the terminal closes: like an interrupt, but the program always ends after
    it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Command(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int:
        """Run the command, and return its exit code. `guarded` prints ParlayError and our own ValueErrors as one
        line."""
        ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (by default the process's own), and return the exit code; argparse may exit instead."""
    if arguments is not None:
        return guarded(lambda: _dispatch(list(arguments)))
    for each in _SIGNALS:
        if signal.getsignal(each) != signal.SIG_IGN:  # background jobs and nohup have it ignored
            signal.signal(each, _interrupt)
    try:
        return guarded(lambda: _dispatch(sys.argv[1:]))
    finally:
        for each in _SIGNALS:
            if signal.getsignal(each) is _interrupt:  # a server may have installed its own handler
                signal.signal(each, signal.SIG_DFL)  # otherwise Python would print a traceback at exit


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Handle a signal; within an import end the process at once, as libraries lose the exception there, or dump
    core."""
    if signum == signal.SIGHUP:
        signal.signal(signum, signal.SIG_IGN)  # a closing terminal sends several: only the first one counts
    error = KeyboardInterrupt() if signum == signal.SIGINT else Terminated(signum)
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            os._exit(code_of(error))
        frame = frame.f_back
    raise error


def code_of(interrupt: KeyboardInterrupt) -> int:
    """The exit code of a command that a signal ended."""
    return 128 + interrupt.signum if isinstance(interrupt, Terminated) else INTERRUPTED


def guarded(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; errors that users can act on are printed as one line."""
    _open_streams()
    _forgive_output()
    try:
        return _written(command)
    except KeyboardInterrupt as interrupt:
        return code_of(interrupt)
    except BrokenPipeError:  # nobody reads any more, as after `parlay ... | head`
        drop_output()
        return FAILURE
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11 wraps it while a class is created
            return code_of(error.__cause__)
        refusal = _refusal_of_system(error)
        code = FAILURE if refusal else _users_mistake(error)
        if code is None:
            raise
        from parlay.system.terminal import printable  # here, as it imports torch

        print(f"parlay: error: {printable(refusal or ' '.join(str(error).split()))}", file=sys.stderr)
        return code
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # the error was reported already, or this is not its cause
            drop_output()


def _written(command: Callable[[], int]) -> int:
    """Run a command and flush its output while a full disk can still be reported as an error of one line."""
    try:
        code = command()
    except SystemExit:  # argparse exits in this way, for example after help
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return code


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR}
_LONGEST_NAME = 80


def _refusal_of_system(error: Exception) -> str:
    """One line about an error of the system: a full disk, or a path that is invalid or not permitted.

    Empty for other errors. Output that could not be written to a full disk is dropped.
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
    """Discard pending output, which Python would otherwise flush at exit and complain about."""
    with suppress(OSError):  # the caller of `main` may have replaced it by an object without a descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(words: list[str]) -> int:
    if not words or words[0] not in COMMANDS:
        return _top_level(words)
    from parlay.types import ParlayError

    command: Command = import_module(f"parlay.cli.{words[0]}")
    parser = parser_of(words[0])
    options = parser.parse(words[1:])
    try:
        return command.run(options)
    except ParlayError as error:
        error.args = (error.named(lambda field: parser.flag_of(field, options), " "), *error.args[1:])
        raise


def parser_of(name: str) -> Parser:
    """Make a command's parser. Raises ParlayError if the command needs a package that is not installed."""
    command: Command = import_module(f"parlay.cli.{name}")
    summary = COMMANDS[name]
    parser = Parser(f"parlay {name}", f"{summary[0].upper()}{summary[1:]}.", everyday=EVERYDAY.get(name, ()))
    command.add_arguments(parser)
    return parser


def _top_level(words: list[str]) -> int:
    parser = Parser("parlay", "Parallel decoding for LLMs: several tokens per forward pass, the same text.")
    parser.add_argument("--version", action="version", version=f"parlay {__version__}")
    parser.usage = "parlay [-h] [--version] COMMAND ..."
    for title, commands in GROUPS.items():
        group = parser.add_argument_group(title)
        for name, summary in commands.items():
            group.add_argument(name, nargs="?", help=summary)  # for help only: no command line gets here
    parser.epilog = (
        "Begin with `parlay run` or `parlay serve`: the default strategy, auto, chooses in each step what to draft by. "
        "`parlay COMMAND -h` lists the options that most people need, and --help all of them."
    )
    if words and not words[0].startswith("-"):
        parser.error(f"there is no command {words[0]}: {ELSEWHERE.get(words[0]) or nearest(words[0], COMMANDS)}")
    if words and words[0] not in parser._option_string_actions:
        parser.error(f"a command comes before the flags, as in parlay generate {' '.join(words)}")
    parser.parse(words)
    parser.print_help()
    return 0


def _users_mistake(error: Exception) -> int | None:
    """The exit code of an error whose message helps a user; None for a bug, which keeps its traceback."""
    from parlay.types import ParlayError  # here, as it imports torch

    if isinstance(error, ValueError) and (isinstance(error, ParlayError) or _raised_here(error)):
        return USAGE
    return FAILURE if isinstance(error, ParlayError) else None


def _raised_here(error: Exception) -> bool:
    """Whether our code raised it; a ValueError of a library that gets here is a bug."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("parlay.")


def _open_streams() -> None:
    """Open the null device for each stream that the shell closed, as `<&-` does.

    Otherwise the next opened file would get its number, and with it what is written to the stream.
    """
    sys.stdin = sys.stdin or _null("r")
    sys.stdout = sys.stdout or _null("w")
    sys.stderr = sys.stderr or _null("w")


def _null(mode: Literal["r", "w"]) -> TextIO:
    return os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8")


def _forgive_output() -> None:
    """Let a terminal that can't show a character show a question mark instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
