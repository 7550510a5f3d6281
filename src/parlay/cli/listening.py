"""The network side of serving commands: the address, API keys, the log, and required packages."""

from __future__ import annotations

import argparse
import errno
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from parlay.cli import drop_output
from parlay.cli.flags import whole
from parlay.serve.observe.logs import JsonLines
from parlay.serve.settings import KeyLimits
from parlay.types import ParlayError

KEY_VARIABLE = "PARLAY_API_KEY"
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
PACKAGES = ("fastapi", "prometheus_client", "uvicorn")
LEVELS = ("debug", "info", "warning", "error")


def add_address_flags(group: argparse._ActionsContainer) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    group.add_argument("--port", type=whole, default=8000, help="port; 0 takes a free one (default: 8000)")


def add_key_flags(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file of API keys, one per line; requests must carry one of them. A key's own limits may follow it: KEY "
        "requests=4 tokens=100000 priority=0",
    )
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="an API key; others on this machine can see it in the process list, so prefer the file, or "
        f"{KEY_VARIABLE} in the environment",
    )


def add_log_flags(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--log-level", choices=LEVELS, default="warning", help="info logs each request (default: warning)"
    )
    group.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="json: one object per line (default: text)"
    )


def read_keys(options: argparse.Namespace, default: KeyLimits) -> dict[str, KeyLimits]:
    """The API keys with their limits."""
    keys = dict.fromkeys(options.api_key, default)
    if KEY_VARIABLE in os.environ:
        if not os.environ[KEY_VARIABLE]:
            raise ValueError(f"{KEY_VARIABLE} is empty: set it to an API key, or unset it")
        keys[os.environ[KEY_VARIABLE]] = default
    if options.api_key_file is not None:
        keys |= _read_keys(options.api_key_file, default)
    return keys


def _read_keys(path: Path, default: KeyLimits) -> dict[str, KeyLimits]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"can't read the API keys in {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"can't read the API keys in {path}: it is not text") from None
    words = [line.split() for line in lines if line.strip()]
    if not words:
        raise ValueError(f"there is no API key in {path}: write one on each line")
    try:
        return {key: default.but(limits) for key, *limits in words}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def set_up_logging(options: argparse.Namespace) -> None:
    handler = logging.StreamHandler(sys.stderr)
    if options.log_format == "json":
        handler.setFormatter(JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=options.log_level.upper(), handlers=[handler])


def check_packages(packages: Sequence[str], what: str, extra: str) -> None:
    missing = [name for name in packages if not _is_installed(name)]
    if missing:
        raise ParlayError(f"{what} needs {', '.join(missing)}: run pip install 'parlay[{extra}]'")


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def check_port(port: int) -> None:
    """Raises ValueError for an impossible port number."""
    if not 0 <= port <= 65535:
        raise ValueError(f"--port must be between 0 and 65535, got {port}")


def is_loopback(host: str) -> bool:
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in _addresses(host, 0))


def _addresses(host: str, port: int) -> list[Any]:
    """Resolve an address with `socket.getaddrinfo`. Raises ValueError for an empty name, ParlayError for one that can't
    be resolved."""
    if not host.strip():
        raise ValueError("--host is empty: name an address, such as 127.0.0.1, or 0.0.0.0 for all networks")
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ParlayError(f"can't listen on {host}: {error.strerror}: name an address of this machine") from None
    except UnicodeError:
        raise ParlayError(f"can't listen on {host}: it is not the name of a machine") from None


def listen(host: str, port: int) -> socket.socket:
    """Open the port before models are loaded, so that a port in use is reported at once."""
    family, kind, protocol, _, address = _addresses(host, port)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ParlayError(
                f"port {port} of {host} is in use: stop the program that uses it, or choose another with --port"
            ) from None
        raise ParlayError(f"can't listen on port {port} of {host}: {error.strerror}") from None
    return listener


def announce(line: str) -> None:
    """Print a server's message; a server whose output nobody reads keeps serving."""
    try:
        print(line, flush=True)
    except OSError:
        drop_output()


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
