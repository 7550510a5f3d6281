"""`parlay serve --record`: what is kept, of whom, how much of it, and that a drafter learns what was written."""

from __future__ import annotations

import argparse
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from parlay.aio import AsyncLLM
from parlay.cli.serve import add_arguments, settings
from parlay.cli.serve_record import recording
from parlay.serve.app import create_app
from parlay.serve.finished import Finished
from parlay.serve.guard.auth import digest
from parlay.serve.observe.recording import MASK, RotatedFiles, TrafficRecord
from parlay.serve.settings import KeyLimits, Settings
from parlay.train.data.user_texts import Cut, encode_user_texts, read_user_texts
from parlay.types import ParlayError

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Say hello to ann@example.org."}], "max_tokens": 8, "temperature": 0}


class Kept:
    """A server that records the traffic of one of its two keys."""

    def __init__(self, engine: AsyncLLM, folder: Path, masks: tuple[str, ...] = ()) -> None:
        self.folder, self.seen = folder, list[Finished]()
        patterns = [re.compile(mask) for mask in masks]
        self.record = TrafficRecord(folder, frozenset({digest("yes")}), most_bytes=10**6, masks=patterns)
        settings = Settings(keys=("yes", "no"))
        app = create_app({"parlay-mini": engine}, settings, [self.record.finished, self.seen.append])
        self._client = TestClient(app)

    def post(self, path: str, body: dict[str, Any], key: str = "yes") -> None:
        reply = self._client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
        assert reply.status_code == 200
        assert reply.text

    def lines(self) -> list[dict[str, Any]]:
        self.record.close()
        return [json.loads(line) for path in sorted(self.folder.iterdir()) for line in path.read_text().splitlines()]


@pytest.fixture
def kept(engine: AsyncLLM, tmp_path: Path) -> Kept:
    return Kept(engine, tmp_path / "kept")


def test_what_the_model_read_and_wrote_is_what_a_drafter_learns(kept: Kept, engine: AsyncLLM) -> None:
    kept.post(CHAT, HELLO)
    kept.post(CHAT, {**HELLO, "stream": True, "n": 2, "temperature": 1, "seed": 3})
    kept.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0})
    lines = kept.lines()
    assert len(lines) == 4
    assert all(line.keys() == {"prompt", "answer", "framed"} for line in lines)
    assert "Say hello to ann@example.org." in lines[0]["prompt"]

    tokenizer = engine.llm.tokenizer
    assert tokenizer is not None
    texts = encode_user_texts(read_user_texts(kept.folder), tokenizer, Cut(prompt=1, answer=99, row=999, documents=1))
    outputs = [request.output for request in kept.seen]
    assert [text.ids for text in texts] == [
        (*output.prompt_token_ids, *sample.token_ids) for output in outputs for sample in output.outputs
    ]


def test_nothing_is_kept_of_those_who_did_not_agree(kept: Kept) -> None:
    kept.post(CHAT, HELLO, key="no")
    kept.post(CHAT, {**HELLO, "store": False})
    kept.post("/v1/completions", {"prompt": "Once", "max_tokens": 2, "store": False})
    assert len(kept.seen) == 3
    assert kept.lines() == []


def test_what_a_mask_matches_reaches_no_file(engine: AsyncLLM, tmp_path: Path) -> None:
    kept = Kept(engine, tmp_path / "kept", masks=(r"\S+@\S+\.org",))
    kept.post(CHAT, HELLO)
    (line,) = kept.lines()
    assert f"Say hello to {MASK}." in line["prompt"]


def test_files_are_bounded_and_nobody_else_can_read_them(tmp_path: Path) -> None:
    folder, line = tmp_path / "kept", b"x" * 99 + b"\n"
    for _ in range(3):  # runs
        files = RotatedFiles(folder, 8_000)
        for _ in range(60):
            files.write(line)
        files.write(b"y" * 2_000)  # no file may be so long
        files.close()
    found = sorted(folder.iterdir())
    assert 4_000 < sum(path.stat().st_size for path in found) <= 8_000
    assert {path.stat().st_mode & 0o777 for path in found} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(set(path.read_bytes().split(b"\n")) <= {b"x" * 99, b""} for path in found)


def test_a_disk_that_fails_costs_records_and_no_request(
    kept: Kept, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("parlay.serve.observe.recording.os.write", full)
    with caplog.at_level(logging.WARNING):
        kept.post(CHAT, HELLO)
        kept.post(CHAT, HELLO)
        kept.record.close()
    assert [record.getMessage() for record in caplog.records if "not recorded" in record.getMessage()] == [
        "some requests are not recorded: [Errno 28] No space left on device"
    ]


def test_a_folder_that_can_not_be_is_told_before_anything_is_served(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ParlayError, match="can't record in"):
        RotatedFiles(tmp_path / "file" / "kept", 1000)


def test_keys_agree_in_their_file() -> None:
    assert KeyLimits().record is False
    assert KeyLimits().but(["record=1", "requests=2"]) == KeyLimits(requests=2, record=True)
    assert KeyLimits(record=True).but(["record=0"]).record is False


@pytest.mark.parametrize("keys", [True, False])
def test_the_command_records_whom_its_key_file_names_and_on_ones_own_machine_oneself(
    keys: bool, engine: AsyncLLM, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("yes record=1\nno requests=9\n")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--record", str(tmp_path / "kept"), *(["--api-key-file", str(tmp_path / "keys")] if keys else [])]
    options = parser.parse_args(words)
    allowed = settings(options)
    with recording(options, allowed) as observers:
        client = TestClient(create_app({"parlay-mini": engine}, allowed, observers), base_url="http://localhost")
        for key in ("yes", "no"):
            reply = client.post(CHAT, json=HELLO, headers={"Authorization": f"Bearer {key}"})
            assert reply.status_code == 200
    lines = [line for path in (tmp_path / "kept").iterdir() for line in path.read_text().splitlines()]
    assert len(lines) == (1 if keys else 2)
