"""Makes an environment for each peer, once, from its pinned requirements."""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import subprocess
import venv
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from benchmarks.peers.catalogue import PEERS, Peer

MADE = "made-from"
"""A file in each environment made here: the digest of its requirements, or empty while it is being made."""

logger = logging.getLogger(__name__)


class NotInstalled(Exception):
    """A peer could not be installed; the message says why."""


def add_venv_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``venvs`` and ``venv``, which `find_all` reads."""
    parser.add_argument(
        "--venvs", type=Path, metavar="DIR", help="folder of the peers' environments; missing ones are made"
    )
    parser.add_argument(
        "--venv",
        type=given,
        action="append",
        default=[],
        metavar="ENGINE=PATH",
        help="use this environment for the engine",
    )


def given(text: str) -> tuple[str, Path]:
    """Parse ``ENGINE=PATH``. The first letters of the engine's name suffice."""
    name, _, path = text.partition("=")
    found = [peer.engine for peer in PEERS if name and path and peer.engine.startswith(name)]
    if len(found) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not ENGINE=PATH with one of {[peer.engine for peer in PEERS]}")
    return found[0], Path(path)


def find_all(engines: Collection[str], options: argparse.Namespace) -> dict[str, Path | str]:
    """Return the Python of each peer, or a sentence that says why there is none. ``options`` has the flags of
    `add_venv_flags`."""
    found: dict[str, Path | str] = {}
    for peer in (peer for peer in PEERS if peer.engine in engines):
        try:
            found[peer.engine] = find(peer, options.venvs, dict(options.venv))
        except NotInstalled as error:
            logger.warning("%s: %s", peer.engine, error)
            found[peer.engine] = str(error)
    return found


def find(peer: Peer, folder: Path | None, given: Mapping[str, Path]) -> Path:
    """Return the absolute path of a peer's Python: in the environment given, or in ``folder``, where it is made if
    necessary.

    Raises NotInstalled.
    """
    if peer.engine in given:
        return _python(given[peer.engine])
    if folder is None:
        raise NotInstalled(f"not installed: give --venvs DIR to make it, or --venv {peer.engine}=PATH")
    place = folder / peer.engine
    if not _is_made(peer, place):
        make(peer, place)
    return _python(place)


def make(peer: Peer, place: Path) -> None:
    """Create the environment and install into it. Raises NotInstalled if that fails or the folder is used otherwise."""
    if place.exists() and not (place / MADE).exists():
        raise NotInstalled(f"{place.name} is there and not of our making: give it with --venv {peer.engine}=PATH")
    logger.info("making the environment of %s", peer.engine)
    try:
        venv.create(place, clear=True, with_pip=True)
        (place / MADE).touch()
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotInstalled(f"no environment can be made at {place.name}: {error}") from error
    _pip(place, "install", "--requirement", str(peer.requirements))
    if peer.unwanted:
        _pip(place, "uninstall", "--yes", *peer.unwanted)
    for package in peer.without_isolation:
        try:
            _pip(place, "install", "--no-build-isolation", "--no-deps", package)
        except NotInstalled as error:  # the modes that need the package report it
            logger.warning("%s goes without %s: %s", peer.engine, package, error)
    (place / MADE).write_text(_digest(peer), encoding="utf-8")


def _is_made(peer: Peer, place: Path) -> bool:
    marker = place / MADE
    return marker.exists() and marker.read_text(encoding="utf-8") == _digest(peer)


def _digest(peer: Peer) -> str:
    parts = (peer.requirements.read_text(encoding="utf-8"), *peer.unwanted, *peer.without_isolation)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _python(place: Path) -> Path:
    python = place.absolute() / "bin" / "python"  # not resolved: behind the link is another environment
    if not python.exists():
        raise NotInstalled(f"not installed: no environment called {place.name} is there")
    return python


def _pip(place: Path, *arguments: str) -> None:
    """Run pip in an environment. Raises NotInstalled with the last line of its error."""
    command: Sequence[str] = (str(place / "bin" / "python"), "-m", "pip", "--quiet", *arguments)
    path = {"PATH": f"{place / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | path)
    if ran.returncode:
        lines = [line for line in ran.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstalled(f"not installed: {(lines or ['pip failed'])[-1]}"[:300])
