"""A user's mistake is one clear line and the right exit code, never a traceback; and it comes before a model loads."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

import pytest

import parlay
from parlay.cli import guarded, main, parser_of
from parlay.cli.commands import COMMANDS, ELSEWHERE, EVERYDAY
from parlay.cli.flags import PYTHON_ONLY, SAMPLING_HELP, chosen_strategy
from parlay.cli.listening import announce
from parlay.strategies.entry import DEFAULT_STRATEGY
from parlay.types import FieldError, SamplingParams, UsageError
from tests.cli.conftest import MINI, NO_MODEL, SNAPSHOTS, Cli

MISTAKES = {
    "unknown command": (["genrate"], "did you mean generate"),
    "unknown flag": (["generate", "x", "--temprature", "1"], "did you mean --temperature"),
    "unknown flag before a subcommand": (["bench", "--modle", "x"], "did you mean --model"),
    "unknown flag of a subcommand": (["train", "lm", "--data", "x", "--contxt", "9"], "did you mean --context"),
    "flag of a subcommand before its name": (["train", "--data", "x", "lm"], "parlay train lm --data x"),
    "flag of a subcommand without its name": (["train", "--data", "x"], "parlay train lm --data x"),
    "abbreviated flag": (["generate", "x", "--temper", "1"], "there is no flag --temper"),
    "no number": (["generate", "x", "--temperature", "hot"], "hot"),
    "temperature below 0": (["generate", "x", "--temperature", "-1"], "temperature"),
    "temperature not finite": (["generate", "x", "--temperature", "nan"], "temperature"),
    "top_p above 1": (["generate", "x", "--top-p", "1.5"], "--top-p must be above 0 and at most 1"),
    "max_tokens below 0": (["generate", "x", "--max-tokens", "-3"], "--max-tokens must be at least 0"),
    "empty stop": (["generate", "x", "--stop", ""], "stop"),
    "empty prompt": (["generate", ""], "prompt is empty"),
    "empty standard input": (["generate"], "prompt is empty"),
    "prompt that is not text": (["generate", "caf\udce9"], "PROMPT must be valid Unicode text"),
    "stop that is not text": (["generate", "x", "--stop", "caf\udce9"], "--stop must be valid Unicode text"),
    "form that is not text": (["generate", "x", "--regex", "caf\udce9"], "--regex must be valid Unicode text"),
    "system message that is not text": (["chat", "--system", "caf\udce9"], "--system must be valid Unicode text"),
    "unknown strategy": (["generate", "x", "--strategy", "prompt-lokup"], "did you mean prompt-lookup"),
    "unknown parameter": (["generate", "x", "--strategy", "prompt-lookup:gramm=3"], "gramm"),
    "parameter out of range": (["generate", "x", "--strategy", "prompt-lookup:k=-1"], "at least 0"),
    "parameter without value": (["generate", "x", "--strategy", "prompt-lookup:k"], "key=value"),
    "effort of one that chooses nothing": (
        ["generate", "x", "--effort", "low", "--strategy", "prompt-lookup"],
        "--effort low is for strategies that choose among drafters, as auto does: strategy prompt-lookup does not",
    ),
    "two efforts": (
        ["generate", "x", "--effort", "low", "--strategy", "auto:effort=high"],
        "strategy auto:effort=high already sets effort=high",
    ),
    "unknown effort": (["generate", "x", "--strategy", "auto:effort=some"], "choose one of low, medium, high"),
    "effort of a server without one": (["serve", "--effort", "low", "--strategy", "none"], "strategy none does not"),
    "training without data": (["train", "lm"], "--data"),
    "training of what": (["train", "everything", "--data", "."], "everything"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_wrong_usage_is_one_line_and_exit_code_2(cli: Cli, case: str) -> None:
    words, named = MISTAKES[case]
    result = cli(*words, *(NO_MODEL if words[:1] == ["generate"] else ()))
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert result.err.startswith("parlay: error: ")
    assert named in result.err


@pytest.mark.parametrize("words", [["generate", "x", "--\x1b[31mred"], ["generate", "--file", "\x1b[31mred" * 99]])
def test_an_error_has_no_escapes_of_the_command_line(cli: Cli, words: list[str]) -> None:
    err = cli(*words).err
    assert "[31mred" in err
    assert "\x1b" not in err


def test_an_error_names_the_flags_of_its_fields_and_leaves_a_word_that_only_looks_like_one() -> None:
    parser = parser_of("serve")
    options = parser.parse([])
    for error, said in (
        (FieldError("concurrency", "must be at least 1, got 0"), "--max-concurrency must be at least 1, got 0"),
        (FieldError("nest alpha", "must be a finite number"), "--nest-alpha must be a finite number"),
        (UsageError("leave room: lower max_model_len=9", "max_model_len"), "leave room: lower --max-model-len 9"),
        (FieldError("dtype", "='dtype': see /dtype and dtype's docs"), "--dtype 'dtype': see /dtype and dtype's docs"),
        (UsageError("strategy remote: max_tokens must be above 0"), "strategy remote: max_tokens must be above 0"),
        (FieldError("not_a_flag", "=1: remove not_a_flag"), "not_a_flag=1: remove not_a_flag"),
    ):
        assert error.named(lambda field: parser.flag_of(field, options), " ") == said


def test_stdin_that_is_not_utf8_is_named_with_its_first_bad_byte(cli: Cli) -> None:
    result = cli("generate", *NO_MODEL, stdin=b"caf\xe9")
    assert result.code == 2
    assert "not UTF-8 (byte 3)" in result.err
    assert result.err.count("\n") == 1


def test_a_model_that_is_not_there_is_a_failure_that_says_what_to_name_instead(cli: Cli) -> None:
    result = cli("generate", "x", *NO_MODEL)
    assert result.code == 1
    assert "/nowhere/at/all" in result.err
    assert "local folder" in result.err
    assert result.err.count("\n") == 1


def test_a_bug_keeps_its_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's ValueError is no user's mistake."""
    monkeypatch.setattr("parlay.cli.strategies.catalogue", lambda: int("not ours"))
    with pytest.raises(ValueError, match="not ours"):
        cli("strategies")


def test_without_a_command_the_help_is_printed(cli: Cli) -> None:
    bare = cli()
    assert (bare.code, bare.err) == (0, "")
    assert bare.out == cli("--help").out


def test_version(cli: Cli) -> None:
    assert cli("--version").out == f"parlay {parlay.__version__}\n"


def test_python_m_parlay_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "parlay", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"parlay {parlay.__version__}\n"


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["train", "egle3"]])
def test_help_and_a_wrong_name_load_no_torch(words: list[str]) -> None:
    code = f"import sys, parlay.cli\ntry: parlay.cli.main({words})\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.endswith("False\n"), done.stderr


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse lays out its help in another way from 3.13 on")
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_flags_change_only_on_purpose(cli: Cli, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole help is kept in ``help/``: edit the file together with the flags."""
    monkeypatch.setenv("COLUMNS", "80")
    result = cli(*filter(None, [command]), "--help")
    assert result.code == 0
    assert result.out == (SNAPSHOTS / f"{command or 'parlay'}.txt").read_text()


@pytest.mark.parametrize("command", EVERYDAY)
def test_the_short_help_shows_what_most_people_need_and_how_to_see_the_rest(cli: Cli, command: str) -> None:
    short, whole = (cli(command, flag).out for flag in ("-h", "--help"))
    flags = set(parser_of(command)._option_string_actions)
    assert flags >= EVERYDAY[command]
    assert all(f"  {flag}" in short for flag in EVERYDAY[command])
    assert f"parlay {command} --help lists all" in short
    assert short.count("\n") < min(60, whole.count("\n"))
    assert whole.startswith(f"usage: parlay {command}")


def test_commands_of_other_programs_name_what_does_the_same_here(cli: Cli) -> None:
    assert not ELSEWHERE.keys() & COMMANDS.keys()
    for word, told in ELSEWHERE.items():
        found = cli(word)
        assert (found.code, found.out) == (2, "")
        assert told in found.err
    assert "did you mean serve?" in cli("serv").err


@pytest.mark.parametrize("command", ["generate", "chat", "run", "serve"])
def test_help_names_the_default_strategy(command: str) -> None:
    said = (SNAPSHOTS / f"{command}.txt").read_text().partition("  --strategy ")[2].partition("  --draft-model")[0]
    assert f"(default: {DEFAULT_STRATEGY})" in said


def test_effort_alone_is_that_of_the_default_strategy() -> None:
    assert str(chosen_strategy(Namespace(strategy=None, effort="high"))) == f"{DEFAULT_STRATEGY}:effort=high"


def test_every_sampling_parameter_is_a_flag_or_known_to_be_none() -> None:
    names = {field.name for field in fields(SamplingParams)}
    assert names == set(SAMPLING_HELP) | PYTHON_ONLY
    assert not set(SAMPLING_HELP) & PYTHON_ONLY


@pytest.mark.parametrize(
    "words",
    ["generate x", "chat", "plan", "bench --workloads prose", "datastore build {text} -o {out}"],
)
def test_a_model_without_a_name_is_no_default(cli: Cli, words: str, tmp_path: Path) -> None:
    """It is what `--model "$MODEL"` says where the variable is not set."""
    (text := tmp_path / "text.txt").write_text("some text")
    result = cli(*words.format(text=text, out=tmp_path / "out").split(), "--model", "")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("parlay: error: the model's name is empty: name a local folder, ")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    "flag",
    ["--model ", "--lora ", "--draft-model ", "--strategy datastore:file=", "--strategy token-recycling:store="],
)
def test_a_home_folder_of_nobody_is_an_error_of_one_line(cli: Cli, flag: str) -> None:
    result = cli("generate", "x", *MINI, *f"{flag}~nobody_at_all/x".split())
    assert (result.code, result.out) == (1, "")
    assert result.err.endswith("~nobody_at_all/x: there is no such home folder: write the path without ~\n")
    assert result.err.count("\n") == 1


def test_an_interrupt_while_a_class_is_made_is_an_interrupt() -> None:
    """Before Python 3.12 it arrives as the cause of a RuntimeError, which is a traceback otherwise."""

    def importing() -> int:
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    assert guarded(importing) == 130


@pytest.mark.parametrize(
    ("module", "sent", "code"),
    [
        ("argparse", "SIGINT", -signal.SIGINT),
        ("torch", "SIGINT", 130),
        ("torch", "SIGTERM", 143),
        ("torch", "SIGHUP", 129),
    ],
)
def test_an_interrupt_amid_an_import_ends_the_program_without_a_word(
    module: str, sent: str, code: int, tmp_path: Path
) -> None:
    """From the first module on, and also where a library loses the exception, as torch does when it looks for numpy."""
    (tmp_path / f"{module}.py").write_text(f"""import signal
try:
    signal.raise_signal(signal.{sent})
except KeyboardInterrupt:
    raise SystemExit("lost")""")
    program = """import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also as a job in the background
sys.path.insert(0, sys.argv.pop())
runpy.run_module("parlay", run_name="__main__", alter_sys=True)"""
    words = [sys.executable, "-c", program, "models", str(tmp_path)]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (code, "", "")


@pytest.mark.usefixtures("signals_as_before")
@pytest.mark.parametrize(("nohup", "code"), [(False, 129), (True, 0)])
def test_a_terminal_that_closes_ends_a_command_which_clears_up_in_peace(
    nohup: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell sends the signal on, so it comes more than once. `nohup` has it ignored."""
    cleared: list[bool] = []

    def command(options: Namespace) -> int:
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            signal.raise_signal(signal.SIGHUP)
            cleared.append(True)
        return 0

    monkeypatch.setattr("parlay.cli.models.run", command)
    monkeypatch.setattr("sys.argv", ["parlay", "models"])
    signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    assert (main(), cleared) == (code, [True])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("words", [("bench", "--workloads"), ("bench", "--workloads", "humaneval", "--data")])
def test_a_text_in_place_of_a_path_is_one_line(cli: Cli, words: tuple[str, ...]) -> None:
    """The system knows no file of so long a name."""
    result = cli(*words, "a tale of " * 600)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("parlay: error: can't use a tale of a tale of ")
    assert result.err.endswith("...: File name too long\n")
    assert len(result.err) < 150


def test_a_path_that_is_refused_is_one_line_and_any_other_fault_of_a_file_keeps_its_trace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused() -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/locked")

    def missing() -> int:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/there")

    assert guarded(refused) == 1
    assert capsys.readouterr().err == "parlay: error: can't use /locked: Permission denied\n"
    with pytest.raises(FileNotFoundError):
        guarded(missing)


def test_a_full_disk_under_the_output_is_one_line() -> None:
    program = "import sys; from parlay.cli import guarded; sys.exit(guarded(lambda: print('x') or 0))"
    with Path("/dev/full").open("w") as full:
        run = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, check=False)
    assert run.returncode == 1
    assert run.stderr == b"parlay: error: can't write the output: No space left on device\n"


def without_python_flags() -> dict[str, str]:
    """The environment, but output waits to be written as it usually does."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("words", [["--help"], ["completion", "--help"], ["--version"]])
def test_a_full_disk_under_the_help_is_one_line(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "parlay", *words],
            env=without_python_flags(),
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (run.returncode, run.stderr) == (1, b"parlay: error: can't write the output: No space left on device\n")


@pytest.mark.parametrize("command", ["sys.exit(3)", "0", "1 / 0", "(_ for _ in ()).throw(KeyboardInterrupt)"])
def test_a_reader_that_is_gone_hears_no_complaint(command: str) -> None:
    """However the command ends, and where an error is told it is that one alone."""
    program = f"import sys; from parlay.cli import guarded; sys.exit(guarded(lambda: print('x') or {command}))"
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=without_python_flags(),
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert run.returncode == (130 if "Keyboard" in command else 1)
    assert b"ipe" not in run.stderr


def test_streams_that_the_shell_closed_are_empty_and_no_file_gets_their_numbers(tmp_path: Path) -> None:
    program = """import sys; from parlay.cli import guarded
def command():
    said = sys.stdin.read() + str(sys.stdin.isatty() or sys.stdout.isatty() or sys.stderr.isatty())
    print(said, file=sys.stderr)
    with open(sys.argv[1], "w") as file:
        print(said, file=file)
        return file.fileno()
sys.exit(guarded(command))"""
    words = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program, str(tmp_path / "said")]
    assert subprocess.run(words, check=False).returncode > 2
    assert (tmp_path / "said").read_text() == "False\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_a_server_serves_though_nobody_can_read_where_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        announce("parlay at http://127.0.0.1:1")
        announce("and again")


def test_help_shows_no_empty_and_no_rounded_default() -> None:
    shown = [
        word for page in SNAPSHOTS.glob("*.txt") for word in re.findall(r"\(default:\s*([^)]*)\)", page.read_text())
    ]
    assert len(shown) > 100
    assert not [word for word in shown if not word.strip() or re.search(r"\de[+-]\d", word)]
