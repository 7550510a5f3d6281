"""Files are written whole or not at all, and what a killed process left goes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from parlay.system.user_cache import user_cache, written_whole
from parlay.types import ParlayError


def test_a_file_becomes_what_was_written_or_stays(tmp_path: Path) -> None:
    path = tmp_path / "made" / "a.bin"
    with written_whole(path, mode=0o600) as part:
        part.write_text("new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(TypeError), written_whole(path) as part:
        part.write_bytes("no bytes")  # type: ignore[arg-type]
    assert path.read_text() == "new"
    assert [*path.parent.iterdir()] == [path]


def test_what_a_killed_process_left_goes_and_what_is_being_written_stays(tmp_path: Path) -> None:
    path, old, young, other = (tmp_path / name for name in ("a", "a1.part", "a2.part", "b1.part"))
    for left in (old, young, other):
        left.touch()
    for left in (old, other):
        os.utime(left, (0, time.time() - 7200))
    with written_whole(path) as part:
        part.write_text("new")
    assert sorted(tmp_path.iterdir()) == [path, young, other]


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no entry in its list."""

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    with pytest.raises(ParlayError, match="set XDG_CACHE_HOME"):
        user_cache()
    monkeypatch.setenv("XDG_CACHE_HOME", "/kept")
    assert user_cache() == Path("/kept/parlay")
