"""`parlay rank`: runs a part of another process's model."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

from parlay.cli.flags import whole
from parlay.ranks.wire import SECRET, WrongSecret, connect, read_address, read_secret
from parlay.types import ParlayError

_TOO_LATE = "rank 0 ended before this rank had joined"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--join",
        required=True,
        metavar="HOST:PORT",
        help="where rank 0 waits: the --rank-listen of parlay serve, generate or chat",
    )
    parser.add_argument("--model", help="the model's files here, if they lie elsewhere than on rank 0's machine")
    parser.add_argument(
        "--threads", type=whole, metavar="N", help="number of threads that decode (default: one per usable core)"
    )
    parser.add_argument(
        "--rank-secret-file", type=Path, metavar="FILE", help="file of the secret, in place of PARLAY_RANK_SECRET"
    )
    parser.add_argument(
        "--rank-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="most time to wait for rank 0 to answer; then its own holds (default: 60)",
    )
    parser.add_argument("--of-parent", action="store_true", help=argparse.SUPPRESS)  # rank 0 listens, or has ended


def run(options: argparse.Namespace) -> int:
    leader, secret = read_address(options.join), read_secret(options.rank_secret_file)
    if not secret:
        raise ParlayError(f"rank 0 requires a secret: set {SECRET}, or add --rank-secret-file")
    try:
        connection = connect(leader, secret, 0, options.rank_timeout, partial(_wait, options))
    except WrongSecret:
        if options.of_parent:  # the parent has passed its secret
            raise ParlayError(_TOO_LATE) from None
        raise
    from parlay.ranks.follower import follow  # here, as it imports torch

    follow(connection, leader, secret, model=options.model, threads=options.threads)
    return 0


def _wait(options: argparse.Namespace) -> None:
    """Print that rank 0 does not answer yet, and how long this rank waits. Raises ParlayError if waiting can't help."""
    if options.of_parent:
        raise ParlayError(_TOO_LATE)
    until = time.strftime("%H:%M:%S", time.localtime(time.time() + options.rank_timeout))
    print(f"parlay: nothing answers at {options.join} yet: waiting until {until}", file=sys.stderr)
