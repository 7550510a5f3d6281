"""`parlay gateway`: one address in front of several servers."""

from __future__ import annotations

import argparse

from parlay.cli import listening
from parlay.cli.flags import add_option_flags, values_from
from parlay.gateway.settings import GatewayOptions, GatewaySettings, read_address
from parlay.options import options_of
from parlay.serve.settings import KeyLimits
from parlay.system.terminal import counted


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
    add_option_flags(parser, GatewayOptions, ["mixed"])
    limits = [name for name in options_of(GatewayOptions) if name != "mixed"]
    add_option_flags(parser.add_argument_group("limits"), GatewayOptions, limits)
    listening.add_log_flags(parser.add_argument_group("logs"))


def run(options: argparse.Namespace) -> int:
    listening.set_up_logging(options)
    listening.check_port(options.port)
    listening.check_packages(listening.PACKAGES, "parlay gateway", "serve")
    from parlay.gateway.app import create_gateway  # here, because they load uvicorn
    from parlay.serve.graceful import GracefulServer

    gateway = create_gateway([read_address(url) for url in options.replica], settings(options))
    with listening.listen(options.host, options.port) as listener:
        welcome = f"parlay gateway to {counted(len(options.replica), 'replica')} at {listening.url_of(listener)}"
        accesses = options.log_level in ("debug", "info")
        server = GracefulServer(gateway, lambda: listening.announce(welcome), gateway.shut_down, access_log=accesses)
        server.run(sockets=[listener])
    return 0


def settings(options: argparse.Namespace) -> GatewaySettings:
    """Make the server's settings from the flags. Raises ValueError for a limit out of range."""
    alone, keys = listening.is_loopback(options.host), listening.read_keys(options, KeyLimits())
    if keys and options.no_auth:
        raise ValueError("--no-auth can't be used with API keys: remove one of them")
    return GatewaySettings(
        keys=keys,
        hosts=(*listening.LOOPBACK_NAMES, options.host) if alone and not keys and not options.no_auth else (),
        open_replicas=alone or options.no_auth or bool(keys),
        **values_from(GatewayOptions, options),
    )
