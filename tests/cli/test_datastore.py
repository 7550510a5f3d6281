"""`parlay datastore`: a corpus of any shape becomes a file, what can't be read is said in one line, and nothing is
left half-written."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parlay.drafters.stores.datastore_file import Datastore
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_tokenizer
from parlay.text import corpus
from tests.cli.conftest import MINI, SNAPSHOTS, Cli, Result
from tests.cli.test_generate import Screen

FOX = "the quick brown fox jumps over the lazy dog and runs away into the dark green forest"


def written(cli: Cli, folder: Path, *words: str, stdin: bytes = b"") -> list[str]:
    """The documents of the datastore that the command line makes, as text."""
    file = folder / "made.store"
    result = cli("datastore", "build", *MINI, *words, "-o", str(file), stdin=stdin)
    assert result.code == 0, result.err
    assert f"parlay generate {' '.join(MINI)} --strategy datastore:file={file}" in result.out
    store = Datastore.open(file)
    tokenizer = load_tokenizer(resolve("parlay-mini"))
    texts: list[list[int]] = [[]]
    for token in store.tokens.tolist():
        if token == store.header.vocab_size:
            texts.append([])
        else:
            texts[-1].append(token)
    return [tokenizer.decode(ids) for ids in texts[:-1]]


def failed(result: Result, code: int, *named: str) -> None:
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith("parlay: error: "), result.err
    assert result.err.count("\n") == 1
    assert all(name in result.err for name in named), result.err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "corpus"
    (made / "deep").mkdir(parents=True)
    (made / "b.txt").write_text(FOX)
    (made / "deep" / "a.jsonl").write_text('{"text": "one"}\n\n{"output": "two", "id": 3}\n{"content": "drei ä"}\n')
    (made / ".hidden").write_text("secret")
    return made


def test_every_shape_of_corpus_is_read(cli: Cli, folder: Path, tmp_path: Path) -> None:
    assert written(cli, tmp_path, str(folder)) == [FOX, "one", "two", "drei ä"]
    assert written(cli, tmp_path, str(folder / "b.txt"), "-", stdin=b"piped") == [FOX, "piped"]


def test_a_long_document_stays_one_and_whole(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_PIECE", 50)
    monkeypatch.setattr(corpus, "_BATCH", 300)
    text = f"{FOX}\n" * 20 + "x" * 170
    assert written(cli, tmp_path, "-", stdin=b"\xef\xbb\xbf" + text.encode()) == [text]


def test_info_says_what_it_holds_to_people_and_as_json(cli: Cli, folder: Path, tmp_path: Path) -> None:
    written(cli, tmp_path, str(folder))
    file = str(tmp_path / "made.store")
    facts = json.loads(cli("datastore", "info", file, "--json").out)
    names = ["file", "version", "tokens", "documents", "vocabulary", "bytes", "tokenizer", "fingerprint", "checksum"]
    assert list(facts) == names
    assert (facts["documents"], facts["vocabulary"], facts["tokenizer"]) == (4, 4096, "parlay-mini")
    assert facts["bytes"] == Path(file).stat().st_size
    shown = cli("datastore", "info", file).out.splitlines()
    assert [line.split()[0] for line in shown] == names


def test_text_that_the_store_holds_is_drafted_from_it(cli: Cli, tmp_path: Path) -> None:
    """From corpus to text, as a user does it; and the text is that of plain decoding."""
    asked = ("generate", "Once upon a time there was a", *MINI, "--max-tokens", "40", "--ignore-eos")
    plain = cli(*asked, "--strategy", "none").out
    written(cli, tmp_path, "-", stdin=f"Once upon a time there was a{plain}".encode())
    fast = cli(*asked, "--strategy", f"datastore:file={tmp_path / 'made.store'},policy=fixed")
    assert fast.out == plain
    assert "from datastore" in fast.err
    steps = int(fast.err.split(" steps")[0].split()[-1])
    assert steps < 15


# ------------------------------------------------------------------------------------------------------ what goes wrong


def test_what_is_not_text_is_left_out_of_a_folder_and_said_but_an_error_where_it_was_named(
    cli: Cli, folder: Path, tmp_path: Path
) -> None:
    (folder / "picture").write_bytes(b"ab\xff\xfe")
    out = str(tmp_path / "store")
    result = cli("datastore", "build", *MINI, str(folder), "-o", out)
    assert result.code == 0
    assert "skipped 1 of 3 files" in result.err
    assert "picture" in result.err
    failed(
        cli("datastore", "build", *MINI, str(folder / "picture"), "-o", out + "2"), 2, "picture", "not UTF-8 (byte 2)"
    )
    failed(cli("datastore", "build", *MINI, "-", "-o", out + "2", stdin=b"\xff"), 2, "standard input", "UTF-8")
    assert not Path(out + "2").exists()


@pytest.mark.parametrize(
    "line", ["no json", "[1]", '{"title": "x"}', '{"text": 3}', '{"text": null, "output": "x"}', '{"text": "\\ud800"}']
)
def test_a_line_without_text_is_named_by_its_number(cli: Cli, tmp_path: Path, line: str) -> None:
    (tmp_path / "c.jsonl").write_text(f'{{"text": "fine"}}\n{line}\n')
    failed(cli("datastore", "build", *MINI, str(tmp_path / "c.jsonl"), "-o", str(tmp_path / "s")), 2, "c.jsonl, line 2")


@pytest.mark.parametrize(
    "case",
    [
        (["datastore"], 2, "ACTION"),
        (["datastore", "burn"], 2, "burn"),
        (["datastore", "build"], 2, "CORPUS"),
        (["datastore", "build", "x"], 2, "--output"),
        (["datastore", "build", "nowhere", "-o", "s"], 2, "no file or folder nowhere"),
        (["datastore", "build", "-", "-o", "no/such/folder/s"], 2, "no folder no/such/folder"),
        (["datastore", "build", "-", "-o", "."], 2, "is a folder"),
        (["datastore", "build", "-", "-o", "s", "--model", "a", "--tokenizer", "b"], 2, "can't be used with"),
        (["datastore", "build", "-", "-o", "s", "--model", "/nowhere/at/all"], 1, "/nowhere/at/all"),
        (["datastore", "build", *MINI, "-", "-o", "s"], 2, "no text"),
        (["datastore", "info", "nowhere"], 1, "nowhere"),
        (["datastore", "info", "."], 1, "directory"),
        (["datastore", "info"], 2, "FILE"),
        (["generate", "x", *MINI, "--strategy", "datastore"], 2, "parlay datastore build"),
        (["generate", "x", *MINI, "--strategy", "datastore:file=nowhere"], 1, "nowhere"),
    ],
)
def test_mistakes_are_one_line(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[list[str], int, str]
) -> None:
    words, code, named = case
    monkeypatch.chdir(tmp_path)
    failed(cli(*words), code, named)
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_refused_by_info_and_by_the_strategy(cli: Cli, folder: Path, tmp_path: Path) -> None:
    written(cli, tmp_path, str(folder))
    file = tmp_path / "made.store"
    content = file.read_bytes()
    file.write_bytes(content[:-3] + b"\7\7\7")
    failed(cli("datastore", "info", str(file)), 1, "checksum")
    failed(cli("generate", "x", *MINI, "--strategy", f"datastore:file={file}"), 1, "checksum")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, also where the suite runs in the background and inherits that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("where", ["encode", "sort", "write"])
def test_ctrl_c_leaves_no_half_file(
    cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupt(*_: object) -> Iterator[object]:
        signal.raise_signal(signal.SIGINT)
        return iter(())

    place = {"encode": corpus.__name__ + "._encode", "sort": "parlay.drafters.stores.datastore_file.suffix_array"}
    monkeypatch.setattr(place.get(where, "os.fsync"), interrupt)
    result = cli("datastore", "build", *MINI, str(folder), "-o", str(tmp_path / "store"))
    assert result.code == 130
    assert "Traceback" not in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_progress_is_shown_on_terminals_alone(
    cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("datastore", "build", *MINI, str(folder), "-o", str(tmp_path / "store"))
    assert cli(*words).err == ""
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    cli(*words)
    assert "tokenising" in screen.getvalue()
    assert "sorting" in screen.getvalue()
    assert "100%" in screen.getvalue()


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse lays out its help in another way from 3.13 on")
@pytest.mark.parametrize("action", ["build", "info"])
def test_flags_change_only_on_purpose(cli: Cli, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = cli("datastore", action, "--help")
    assert result.code == 0
    assert result.out == (SNAPSHOTS / f"datastore-{action}.txt").read_text()
