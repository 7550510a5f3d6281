"""`parlay chat` on the built-in model: history, commands between messages, errors that lose nothing."""

from __future__ import annotations

import io
import json
import shutil
import signal
from pathlib import Path

import pytest

from parlay.cli import Terminated, main
from parlay.cli.terminal_chat.loop import read_line
from parlay.engine.engine import Engine
from parlay.models.fetch.resolving import resolve
from tests.cli.conftest import Cli

FLAGS = ("--model", "parlay-mini", "--max-tokens", "12", "--temperature", "0")


def test_a_conversation_keeps_its_history(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    result = cli("chat", *FLAGS, "--system", "Be short.", stdin=f"Hello\nAnd you?\n/save {path}\n".encode())
    assert result.code == 0, result.err
    roles = [message["role"] for message in json.loads(path.read_text(encoding="utf-8"))]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert result.err.count("tokens/s") == 2


def test_retry_with_the_same_seed_gives_the_same_answer(cli: Cli, tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    lines = f"/seed 3\nHello\n/save {one}\n/strategy none\n/retry\n/save {two}\n/exit\nnever read\n"
    result = cli("chat", *FLAGS, "--temperature", "1", stdin=lines.encode())
    assert result.code == 0, result.err
    assert one.read_text(encoding="utf-8") == two.read_text(encoding="utf-8")
    assert "never read" not in two.read_text(encoding="utf-8")


def test_lines_between_triple_quotes_are_one_message_and_no_command(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    result = cli("chat", *FLAGS, stdin=f'"""\n/exit is a word.\n  Is it?\n"""\n/save {path}\n'.encode())
    assert result.code == 0, result.err
    asked, _ = json.loads(path.read_text(encoding="utf-8"))
    assert asked["content"] == "/exit is a word.\n  Is it?"


def test_a_message_whose_triple_quotes_never_close_is_told_not_dropped(cli: Cli) -> None:
    result = cli("chat", *FLAGS, stdin=b'"""One\nTwo\n')
    assert (result.code, result.out) == (0, "")
    assert result.err.endswith('error: the last message was not sent: end it with """\n')


def test_ctrl_c_keeps_the_chat_and_sigterm_ends_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    signals = iter([KeyboardInterrupt(), Terminated(signal.SIGTERM)])

    def read(prompt: str) -> str:
        raise next(signals)

    monkeypatch.setattr("parlay.cli.terminal_chat.loop.read_line", read)
    result = cli("chat", *FLAGS)
    assert result.code == 143
    assert result.err.endswith("(/exit or Ctrl-D leaves)\n")


def test_a_line_that_fails_loses_nothing(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    result = cli("chat", *FLAGS, stdin=f"/nope\n/set temperature hot\nHello\n/save {path}\n".encode())
    assert result.code == 0
    assert result.err.count("error:") == 2
    assert len(json.loads(path.read_text(encoding="utf-8"))) == 2


def test_a_strategy_that_cannot_be_had_is_refused_at_once_and_the_chat_goes_on(cli: Cli) -> None:
    result = cli("chat", *FLAGS, stdin=b"/strategy datastore\nHello\n")
    assert result.code == 0
    assert "error: strategy datastore" in result.err
    assert "tokens/s, auto" in result.err


def test_old_messages_leave_when_the_context_is_full_and_that_is_said(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    line = "word " * 1800
    result = cli("chat", *FLAGS, stdin=f"{line}\n{line}\n{line}\n/save {path}\n".encode())
    assert result.code == 0, result.err
    assert "not fit and are forgotten" in result.err
    assert len(json.loads(path.read_text(encoding="utf-8"))) < 6


def test_a_message_that_can_not_be_answered_costs_no_other(cli: Cli, tmp_path: Path) -> None:
    """However many older ones leave, it does not fit."""
    path = tmp_path / "chat.json"
    result = cli("chat", *FLAGS, stdin=f"Hello\n{'word ' * 5000}\n/save {path}\n".encode())
    assert result.code == 0, result.err
    assert ": shorten it\n" in result.err
    assert "forgotten" not in result.err
    assert [each["role"] for each in json.loads(path.read_text(encoding="utf-8"))] == ["user", "assistant"]


@pytest.mark.usefixtures("signals_as_before")
def test_a_second_ctrl_c_takes_the_message_back_and_ends_the_line(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = Engine.step, iter(range(1000))

    def interrupted(engine: Engine) -> object:
        for _ in range(2 if next(steps) == 2 else 0):
            signal.raise_signal(signal.SIGINT)
        return step(engine)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(Engine, "step", interrupted)
    result = cli("chat", *FLAGS, stdin=f"Hello\n/save {tmp_path / 'chat.json'}\n".encode())
    assert result.code == 0, result.err
    assert "(/exit or Ctrl-D leaves)\n" in result.err
    assert result.out.strip()
    assert result.out.endswith("\n")
    assert json.loads((tmp_path / "chat.json").read_text(encoding="utf-8")) == []


class Keyboard(io.TextIOWrapper):
    """A terminal's input."""

    def isatty(self) -> bool:
        return True


def test_keys_that_are_no_text_spoil_their_line_alone_and_the_end_ends_the_prompts_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Keyboard(io.BytesIO(b"caf\xe9\nHello\n"), encoding="utf-8"))
    assert main(["chat", *FLAGS]) == 0
    out, err = capsys.readouterr()
    assert "error: the prompt is not valid Unicode text\n" in err
    assert "tokens/s" in err
    assert out.endswith("\n> \n")


def test_a_model_without_a_chat_template_is_refused_with_what_to_do(cli: Cli, tmp_path: Path) -> None:
    shutil.copytree(resolve("parlay-mini"), tmp_path / "bare")
    for path in (tmp_path / "bare").glob("chat_template*"):
        path.unlink()
    config = tmp_path / "bare" / "tokenizer_config.json"
    said = json.loads(config.read_text(encoding="utf-8"))
    said.pop("chat_template", None)
    config.write_text(json.dumps(said), encoding="utf-8")
    result = cli("chat", "--model", str(tmp_path / "bare"), stdin=b"Hello\n")
    assert result.code == 2
    assert "has no chat template: use parlay generate" in result.err


def test_the_makers_sampling_is_the_default(cli: Cli, tmp_path: Path) -> None:
    shutil.copytree(resolve("parlay-mini"), tmp_path / "tuned")
    said = {"do_sample": True, "temperature": 0.25, "top_k": 5, "top_p": None}
    (tmp_path / "tuned" / "generation_config.json").write_text(json.dumps(said), encoding="utf-8")
    result = cli("chat", "--model", str(tmp_path / "tuned"), "--top-k", "6", stdin=b"/set\n")
    assert result.code == 0, result.err
    assert "temperature 0.25" in result.err
    assert "top_k 6" in result.err
    assert "top_p 0.95" in result.err


def test_input_that_is_not_text_and_a_draft_model_for_no_strategy_are_one_line(cli: Cli) -> None:
    for words, stdin, said in [
        ((), b"caf\xe9\n", "not UTF-8 (byte 3)"),
        (
            ("--draft-model", "parlay-mini-draft", "--strategy", "none"),
            b"Hello\n",
            "--draft-model has no effect with strategy none",
        ),
    ]:
        result = cli("chat", *FLAGS, *words, stdin=stdin)
        assert result.code == 2
        assert result.err.splitlines()[-1].startswith("parlay: error: ")
        assert said in result.err


def test_bytes_that_a_locale_would_let_through_are_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no locale is set, Python reads bytes that are no UTF-8 as halves of surrogate pairs."""
    lines = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8", errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", lines)
    with pytest.raises(ValueError, match=r"not UTF-8 \(byte 3\)"):
        read_line("> ")
