"""The folder where Parlay keeps what it can make or fetch again: calibrations, tokenizers, models."""

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
"""After so long without a write, nobody finishes a file any more."""


def user_cache() -> Path:
    """``$XDG_CACHE_HOME/parlay``, else ``~/.cache/parlay``; it need not exist. Raises ParlayError without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "parlay"
    except RuntimeError:
        raise ParlayError("there is no home folder: set XDG_CACHE_HOME to one for what Parlay keeps") from None


def check_output(path: Path) -> None:
    """Raises ValueError now for what would otherwise fail after a long time."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file to write")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file, and would be replaced by one: name another")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"no folder {path.parent} to write {path.name} to: make it first")


@contextmanager
def written_whole(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """A file to write to, which becomes ``path`` when all went well and goes away otherwise.

    ``mode``: who may read it. What a process left here that was killed while it wrote goes too. Raises OSError.
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
    """Let one process at a time read and write files of a folder, among those that ask for it.

    Where the system has no such locks, or the folder can't be opened, nobody waits.
    """
    with ExitStack() as closing:
        with suppress(ImportError, OSError):
            from fcntl import LOCK_EX, flock  # here, because some systems have no such module

            descriptor = os.open(folder, os.O_RDONLY)
            closing.callback(os.close, descriptor)  # which gives the lock back
            flock(descriptor, LOCK_EX)
        yield


@contextmanager
def saved_whole(path: Path) -> Iterator[Path]:
    """The same for what a user asked to save: where it can't be written, a ParlayError names it."""
    from safetensors import SafetensorError  # here, because commands without tensors read this module

    try:
        with written_whole(path) as part:
            yield part
    except (OSError, SafetensorError) as error:
        raise ParlayError(f"can't write {path} ({error}); what it held before, if anything, is intact") from error
