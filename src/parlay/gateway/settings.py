"""Settings of a gateway: its replicas, how long it waits for them, and how much it takes from clients."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from parlay.serve.settings import KeyLimits

MOST_REPLICAS = 256


@dataclass(frozen=True, slots=True)
class Address:
    """Where a replica listens: host and port, or the ``socket`` of a process on this machine."""

    host: str = "localhost"
    port: int = 80
    tls: bool = False
    socket: str = ""

    @property
    def url(self) -> str:
        if self.socket:
            return f"unix:{self.socket}"
        return f"http{'s' if self.tls else ''}://{self.authority}"

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        if self.socket:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_address(url: str) -> Address:
    """Read ``http://HOST:PORT``. Raises ValueError for what is no such URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    more = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if parts.scheme not in ("http", "https") or not parts.hostname or more:
        raise ValueError(f"--replica {url}: give the address of a server, as in http://127.0.0.1:8001")
    tls = parts.scheme == "https"
    return Address(parts.hostname, port or (443 if tls else 80), tls)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Times in seconds, sizes in bytes.

    ``keys``: one of them must come with every request, none given, none asked for; the first is the gateway's own, with
    which it asks the replicas. ``health_seconds``: a replica that does not answer `/ready` for so long is lost.
    ``silence_seconds``: so is an answer of which no byte came for so long. ``wait_seconds``: how long a request waits
    for a replica when none is ready. ``retries``: how often a request that makes no progress is tried again.
    ``spread``: a replica gets at most so many times the mean of requests before those that belong to it go elsewhere.
    ``hosts`` are the names that the Host header may carry; none: any. ``open_replicas``: replicas that ask for no key
    may be used, although others than this machine reach the gateway. ``mixed``: so may those of another build or
    instruction set than the others. ``via`` is the gateway's line of the header Via in all that it sends, by which it
    knows what comes back to it. Raises ValueError for a value that can't be used.
    """

    keys: Mapping[str, KeyLimits] = field(default_factory=dict, repr=False)
    hosts: tuple[str, ...] = ()
    open_replicas: bool = True
    mixed: bool = False
    max_body_bytes: int = 4 * 1024 * 1024
    max_reply_bytes: int = 64 * 1024 * 1024
    concurrency: int = 2048
    connect_seconds: float = 5.0
    health_seconds: float = 10.0
    probe_seconds: float = 1.0
    silence_seconds: float = 600.0
    wait_seconds: float = 10.0
    drain_seconds: float = 30.0
    retries: int = 3
    spread: float = 1.25
    via: bytes = field(default_factory=lambda: b"1.1 parlay-" + secrets.token_hex(8).encode(), repr=False)

    def __post_init__(self) -> None:
        for name, value in (
            ("max_body_bytes", self.max_body_bytes),
            ("concurrency", self.concurrency),
            ("health_seconds", self.health_seconds),
            ("silence_seconds", self.silence_seconds),
        ):
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value:g}")
        for name, value in (
            ("wait_seconds", self.wait_seconds),
            ("drain_seconds", self.drain_seconds),
            ("retries", self.retries),
        ):
            if not value >= 0:
                raise ValueError(f"{name} must be at least 0, got {value:g}")
