"""`parlay generate --document`: a file that the output may repeat speeds it up and never changes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.cli.test_generate import failed

ASKED = ("generate", "Once upon a time there was a", "--model", "parlay-mini", "--max-tokens", "40", "--ignore-eos")


def steps(err: str) -> int:
    return int(err.split(" steps")[0].split()[-1])


def test_a_document_that_holds_the_answer_takes_fewer_steps(cli: Cli, tmp_path: Path) -> None:
    plain = cli(*ASKED, "--strategy", "none")
    (tmp_path / "found").write_bytes(b"\xef\xbb\xbfOnce upon a time there was a" + plain.out.encode())
    (tmp_path / "empty").touch()
    names = ("--document", str(tmp_path / "empty"), "--document", str(tmp_path / "found"))
    fast = cli(*ASKED, "--strategy", "prompt-lookup:policy=fixed", *names)
    assert fast.out == plain.out
    assert steps(fast.err) < steps(plain.err) // 3
    assert cli(*ASKED, *names, "--no-store").out == plain.out


@pytest.mark.parametrize(("content", "named"), [(None, "No such file"), (b"caf\xe9", "not UTF-8 (byte 3)")])
def test_one_that_cannot_be_read_is_said_before_a_model_loads(
    cli: Cli, tmp_path: Path, content: bytes | None, named: str
) -> None:
    path = tmp_path / "document"
    if content is not None:
        path.write_bytes(content)
    failed(cli(*ASKED, "--model", "/nowhere/at/all", "--document", str(path)), 2, named)
    failed(cli(*ASKED, "--model", "/nowhere/at/all", "--document", str(tmp_path)), 2, "Is a directory")
