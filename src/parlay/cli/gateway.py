"""`parlay gateway`: one address in front of several servers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from parlay.cli import listening
from parlay.cli.flags import whole
from parlay.serve.settings import KeyLimits
from parlay.system.terminal import counted

if TYPE_CHECKING:
    from parlay.gateway.settings import GatewaySettings

_LIMITS: tuple[tuple[str, Callable[[str], float], str, float, str], ...] = (
    ("--max-body-bytes", whole, "N", 4 * 1024 * 1024, "most bytes of a request's body"),
    ("--max-concurrency", whole, "N", 2048, "most requests under way at once"),
    ("--retries", whole, "N", 3, "how often a request that makes no progress is sent to another replica"),
    ("--health-seconds", float, "SECONDS", 10.0, "a replica that does not answer /ready for so long is lost"),
    ("--silence-seconds", float, "SECONDS", 600.0, "an answer counts as lost if no byte of it came for so long"),
    ("--wait-seconds", float, "SECONDS", 10.0, "how long a request waits while no replica is ready"),
    ("--drain-seconds", float, "SECONDS", 30.0, "time that running requests have to finish when the gateway stops"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--replica",
        action="append",
        default=[],
        metavar="URL",
        help="address of a parlay serve, as in http://127.0.0.1:8001; give each replica",
    )
    group = parser.add_argument_group("network and access")
    listening.add_address_flags(group)
    listening.add_key_flags(group)
    group.add_argument(
        "--no-auth", action="store_true", help="let other machines reach replicas that ask for no API key"
    )
    parser.add_argument(
        "--mixed",
        action="store_true",
        help="use replicas of different builds and kernels, as during an update; streams don't go on from one kind to "
        "the other",
    )
    group = parser.add_argument_group("limits")
    for flag, kind, metavar, default, text in _LIMITS:
        shown = default if kind is whole else f"{default:g}"
        group.add_argument(flag, type=kind, default=default, metavar=metavar, help=f"{text} (default: {shown})")
    listening.add_log_flags(parser.add_argument_group("logs"))


def run(options: argparse.Namespace) -> int:
    listening.set_up_logging(options)
    listening.check_port(options.port)
    listening.check_packages(listening.PACKAGES, "parlay gateway", "serve")
    from parlay.gateway.app import create_gateway  # here, because they load uvicorn
    from parlay.gateway.settings import read_address
    from parlay.serve.graceful import GracefulServer

    gateway = create_gateway([read_address(url) for url in options.replica], settings(options))
    with listening.listen(options.host, options.port) as listener:
        welcome = f"parlay gateway to {counted(len(options.replica), 'replica')} at {listening.url_of(listener)}"
        accesses = options.log_level in ("debug", "info")
        server = GracefulServer(gateway, lambda: listening.announce(welcome), gateway.shut_down, access_log=accesses)
        server.run(sockets=[listener])
    return 0


def settings(options: argparse.Namespace) -> GatewaySettings:
    """Read what the flags allow. Raises ValueError for a limit out of range."""
    from parlay.gateway.settings import GatewaySettings

    alone, keys = listening.is_loopback(options.host), listening.read_keys(options, KeyLimits())
    if keys and options.no_auth:
        raise ValueError("there are API keys and --no-auth: choose one")
    return GatewaySettings(
        keys=keys,
        hosts=(*listening.LOOPBACK_NAMES, options.host) if alone and not keys and not options.no_auth else (),
        open_replicas=alone or options.no_auth or bool(keys),
        mixed=options.mixed,
        max_body_bytes=options.max_body_bytes,
        concurrency=options.max_concurrency,
        health_seconds=options.health_seconds,
        silence_seconds=options.silence_seconds,
        wait_seconds=options.wait_seconds,
        drain_seconds=options.drain_seconds,
        retries=options.retries,
    )
