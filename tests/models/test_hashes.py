"""Hashes of large files: made once, and anew when a file has changed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from parlay.models.fetch import hashes
from parlay.models.fetch.hashes import remembered_hash_of
from parlay.system.user_cache import user_cache

SIZE = (1 << 20) + 1


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(SIZE))
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def unread(_path: Path) -> str:
    raise AssertionError("a file was read again")


def test_a_file_is_read_once_under_any_of_its_names(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.with_name("link").symlink_to(file)
    first = remembered_hash_of(file)
    monkeypatch.setattr(hashes, "hash_of", unread)
    assert remembered_hash_of(file) == remembered_hash_of(file.with_name("link")) == first == sha256(file)


def test_a_changed_file_is_read_again_though_size_and_time_are_as_before(file: Path) -> None:
    remembered_hash_of(file)
    before = file.stat()
    file.write_bytes(os.urandom(SIZE))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert remembered_hash_of(file) == sha256(file)
    other = file.with_name("other")
    other.write_bytes(os.urandom(SIZE))
    other.replace(file)
    assert remembered_hash_of(file) == sha256(file)


@pytest.mark.parametrize("damaged", ["", "[]", '{"a": 1}', "[" * 100_000, "null", "\0"])
def test_a_damaged_memory_is_left_out_and_written_anew(file: Path, damaged: str) -> None:
    memory = user_cache() / "hashes.json"
    memory.parent.mkdir(parents=True)
    memory.write_text(damaged)
    assert remembered_hash_of(file) == sha256(file)
    assert sha256(file) in memory.read_text()


def test_what_cannot_be_remembered_is_told_all_the_same(file: Path) -> None:
    user_cache().parent.write_text("no folder")
    assert remembered_hash_of(file) == sha256(file)


def test_a_file_that_was_not_read_for_long_is_remembered_at_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading changes when it was read last, and nothing else."""
    os.utime(file, (0, 0))
    first = remembered_hash_of(file)
    monkeypatch.setattr(hashes, "hash_of", unread)
    assert remembered_hash_of(file) == first


def test_no_more_than_some_are_remembered(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "_MOST", 2)
    for number in range(4):
        copy = file.with_name(f"weights {number}")
        copy.write_bytes(os.urandom(SIZE))
        remembered_hash_of(copy)
    kept = (user_cache() / "hashes.json").read_text()
    assert [f"weights {number}" in kept for number in range(4)] == [False, False, True, True]
