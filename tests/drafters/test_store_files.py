"""Files of stores: what is written is read back, and whatever is not wholly right is refused in one line."""

from __future__ import annotations

import os
import struct
import threading
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parlay.drafters.stores import store_files
from parlay.drafters.stores.store_files import Lists, Saving, StoreFile
from parlay.options import UsageError

LISTS: Lists = {"": [array("i", [1, 2, 3]), array("i")], "tenant é": [array("i", [9])]}


@pytest.fixture
def file(tmp_path: Path) -> StoreFile:
    return StoreFile(tmp_path / "past.store", "outputs", 10, "made")


@settings(max_examples=30)  # each writes a file to the disk
@given(lists=st.dictionaries(st.text(st.characters(codec="utf-8")), st.lists(st.lists(st.integers(0, 9)))))
def test_lists_survive_a_round_trip(
    lists: dict[str, list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = StoreFile(tmp_path_factory.mktemp("stores") / "past.store", "outputs", 10, "made")
    arrays = {salt: [array("i", one) for one in tenant] for salt, tenant in lists.items()}
    file.save(arrays)
    assert file.load() == arrays


def test_no_file_is_an_empty_store_and_no_directory_an_error(file: StoreFile, tmp_path: Path) -> None:
    assert file.load() == {}
    with pytest.raises(UsageError, match="its directory does not exist"):
        replace(file, path=tmp_path / "nowhere" / "past.store").load()
    with pytest.raises(UsageError, match="can't be read"):
        replace(file, path=tmp_path).load()


def test_a_file_for_something_else_is_refused_by_what_it_is(file: StoreFile) -> None:
    file.save(LISTS)
    with pytest.raises(UsageError, match=r"strategy made: store=.*past.store.*vocabulary of 10, this target has 11$"):
        replace(file, vocab_size=11).load()
    with pytest.raises(UsageError, match="it holds outputs, not choices"):
        replace(file, kind="choices").load()


def _loaded(file: StoreFile) -> Lists | None:
    """None where it is refused. What is set aside is there, under its new name."""
    data = file.path.read_bytes()
    try:
        lists = file.load()
    except UsageError:
        return None
    assert lists or file.path.with_name("past.store.damaged").read_bytes() == data
    return lists


def test_any_damage_is_noticed(file: StoreFile) -> None:
    """Each byte changed, and each length cut to: the file is refused, or set aside and a new one begins."""
    file.save(LISTS)
    data = file.path.read_bytes()
    for place in range(len(data)):
        file.path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert not _loaded(file)
        file.path.write_bytes(data[:place])
        assert not _loaded(file)


def test_a_file_whose_checksum_is_right_but_whose_lists_are_not_is_set_aside(
    file: StoreFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.save({"": [array("i", [10])]})
    with pytest.raises(UsageError, match="token outside the vocabulary of 10"):
        file.load()
    for payload in (struct.pack("<IIb", 1, 0, -1), struct.pack("<III", 0, 1, 1 << 31), b"\0"):
        with monkeypatch.context() as patch:
            patch.setattr(store_files, "_encode", lambda lists, payload=payload: payload)
            file.save({})
        assert _loaded(file) == {}
        assert not file.path.exists()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    file: StoreFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.save(LISTS)

    def fail(source: str, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(store_files.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        file.save({})
    assert file.load() == LISTS
    assert [path.name for path in file.path.parent.iterdir()] == ["past.store"]


def test_no_request_waits_for_the_disk(file: StoreFile, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write, texts, replace_file = threading.Event(), LISTS, os.replace

    def wait_and_replace(source: str, target: Path) -> None:
        assert may_write.wait(60)
        replace_file(source, target)

    monkeypatch.setattr(store_files.os, "replace", wait_and_replace)
    saving = Saving(file, 1, lambda: texts)
    saving.changed()
    saving.changed()
    assert not file.path.exists()
    may_write.set()
    texts = {"": [array("i", [3])]}
    saving.save()
    assert file.load() == texts


def test_the_thread_that_writes_gathers_what_is_written(file: StoreFile) -> None:
    gathered_by: list[str] = []

    def gather() -> Lists:
        gathered_by.append(threading.current_thread().name)
        return LISTS

    saving = Saving(file, 1, gather)
    saving.changed()
    saving.save()
    assert gathered_by == [store_files.STORE_WRITER]
