"""Runs command lines in this process, with its own standard streams."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from parlay.cli import main

SNAPSHOTS = Path(__file__).parent / "help"
NO_MODEL = ("--model", "/nowhere/at/all")
"""No such model exists: a command that names it and reports another mistake has not looked for the model."""
MINI = ("--model", "parlay-mini")
"""Names the test model. Without a name, a command would fetch a real model."""


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """``cli(*words, stdin=b"...")`` gives exit code, standard output and standard error."""

    monkeypatch.setattr("parlay.cli.opening.SILENT_SECONDS", 600.0)  # no line that depends on the machine's speed

    def run(*words: str, stdin: bytes = b"") -> Result:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        try:
            code: object = main(words)
        except SystemExit as end:  # argparse's own way out
            code = end.code
        assert isinstance(code, int)
        return Result(code, *capsys.readouterr())

    return run
