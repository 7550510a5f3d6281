"""Settings of a gateway: its replicas, how long it waits for them, and what it accepts from clients."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from parlay.options import Options, check_values, option
from parlay.serve.settings import KeyLimits

MOST_REPLICAS = 256
_GATEWAY = re.compile(rb"1\.1 parlay-[0-9a-f]{16}")
"""A gateway's line in the header Via."""
_MOST_ASKERS = 16


@dataclass(frozen=True, slots=True)
class Address:
    """A replica's address: host and port, or the ``socket`` of a process on this machine."""

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
    """Parse ``http://HOST:PORT``. Raises ValueError for any other text."""
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


def gateways_in(header: bytes) -> tuple[bytes, ...]:
    """The lines of gateways in a header Via, in order."""
    return tuple(_GATEWAY.findall(header))


class Via:
    """The header Via of a gateway, by which it knows what comes back to it: ``own`` is its line of that header."""

    def __init__(self) -> None:
        self.own = b"1.1 parlay-" + secrets.token_hex(8).encode()
        self._askers: dict[bytes, None] = {}
        """The Via lines of gateways that have this gateway as a replica, directly or through other gateways."""

    def note_askers(self, header: bytes) -> None:
        """Remember the gateways through which a health check came."""
        for line in gateways_in(header):
            self._askers.pop(line, None)
            self._askers[line] = None
        for line in list(self._askers)[:-_MOST_ASKERS]:
            del self._askers[line]

    def of_check(self) -> bytes:
        """The header of a health check: a replica that finds its own line in it has this gateway as a replica."""
        return b", ".join([self.own, *(line for line in self._askers if line != self.own)])


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions(Options):
    """Fields of `GatewaySettings` that are flags of `parlay gateway`; times in seconds, sizes in bytes.

    Raises UsageError for a value that can't be used.
    """

    max_body_bytes: int = option(4 * 1024 * 1024, "most bytes of a request's body", low=1)
    concurrency: int = option(2048, "most requests under way at once", low=1, flag="max-concurrency")
    retries: int = option(3, "how often a request that makes no progress is sent to another replica", low=0)
    health_seconds: float = option(
        10.0, "a replica that does not answer /ready for so long is lost", above=0, metavar="SECONDS"
    )
    silence_seconds: float = option(
        600.0, "an answer counts as lost if no byte of it came for so long", above=0, metavar="SECONDS"
    )
    wait_seconds: float = option(10.0, "how long a request waits while no replica is ready", low=0, metavar="SECONDS")
    drain_seconds: float = option(
        30.0, "time that running requests have to finish when the gateway stops", low=0, metavar="SECONDS"
    )
    mixed: bool = option(
        False,
        "use replicas of different builds and kernels, as during an update; streams don't go on from one kind to the "
        "other",
        switch=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings(GatewayOptions):
    """Limits, keys and flags of a gateway.

    ``keys``: every request must carry one of them; if there are none, no key is asked for. The gateway's own health
    checks carry the first. ``spread``: a replica gets at most this many times the mean number of requests; further
    requests go to other replicas. ``hosts``: the names that the Host header may carry; empty: any. ``open_replicas``:
    replicas that ask for no key may be used, although other machines can reach the gateway. ``via`` makes the
    header Via of everything that the gateway sends, by which it recognizes its own requests.
    """

    keys: Mapping[str, KeyLimits] = field(default_factory=dict, repr=False)
    hosts: tuple[str, ...] = ()
    open_replicas: bool = True
    max_reply_bytes: int = 64 * 1024 * 1024
    connect_seconds: float = 5.0
    probe_seconds: float = 1.0
    spread: float = 1.25
    via: Via = field(default_factory=Via, repr=False)

    def __post_init__(self) -> None:
        check_values(self, GatewayOptions)
