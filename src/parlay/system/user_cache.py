"""The folder for data that Parlay can make or fetch again: calibrations, tokenizers, models."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path

from parlay.types import ParlayError

_ABANDONED_SECONDS = 3600.0
"""A partial file without writes for this long is abandoned."""


def user_cache() -> Path:
    """Return ``$XDG_CACHE_HOME/parlay``, else ``~/.cache/parlay``; it need not exist.

    Raises ParlayError if there is no home folder.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parlay"
    except RuntimeError:
        raise ParlayError("there is no home folder: set XDG_CACHE_HOME to one for what Parlay keeps") from None


def check_output(path: Path) -> None:
    """Raise ValueError for an output path that can't be written, before long work whose result it would get."""
    _check_no_folder(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file, and would be replaced by one: name another")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"no folder {path.parent} to write {path.name} to: make it first")


def check_makeable(path: Path) -> None:
    """Raise ValueError for an output file that can't be written, whose folder need not exist: it would be made."""
    _check_no_folder(path)
    if path.exists():
        return
    folder = next(each for each in path.absolute().parents if each.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"can't write {path}: {folder} is not a folder that can be written to: name another place")


def _check_no_folder(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file to write")


@contextmanager
def written_whole(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """Yield a temporary file to write to; it replaces ``path`` if the block succeeds and is deleted otherwise.

    ``mode``: the permissions of ``path``. Abandoned temporary files of killed processes are deleted, too. Raises
    OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{escape(path.name)}*.part"):
        with suppress(FileNotFoundError):
            if left.stat().st_mtime < time.time() - _ABANDONED_SECONDS:
                left.unlink()
    handle, name = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        part.chmod(mode)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Lock a folder: only one of the processes that use this lock runs its block at a time.

    If the system has no such locks, or the folder can't be opened, the block runs without a lock.
    """
    with ExitStack() as closing:
        with suppress(ImportError, OSError):
            from fcntl import LOCK_EX, flock  # here, because some systems have no such module

            descriptor = os.open(folder, os.O_RDONLY)
            closing.callback(os.close, descriptor)  # closing releases the lock
            flock(descriptor, LOCK_EX)
        yield


@contextmanager
def saved_whole(path: Path) -> Iterator[Path]:
    """Do as `written_whole` for a file that a user asked to save: on failure a ParlayError names it."""
    from safetensors import SafetensorError  # here, because commands without tensors read this module

    try:
        with written_whole(path) as part:
            yield part
    except (OSError, SafetensorError) as error:
        raise ParlayError(f"can't write {path} ({error}); what it held before, if anything, is intact") from error
