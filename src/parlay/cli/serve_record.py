"""`parlay serve --record`: records prompts and answers of users who agreed, to train drafters on one's own traffic."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.cli.flags import whole
from parlay.serve.settings import Settings

if TYPE_CHECKING:
    from parlay.serve.finished import Observer

_MEGABYTES = 256


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("learning from use")
    group.add_argument(
        "--record",
        type=Path,
        metavar="FOLDER",
        help="keep prompts and answers in files here, for parlay train --texts: of the API keys whose line in the file "
        "of keys says record=1, or, on a server without keys that only this machine reaches, of all requests; never "
        'of requests with "store": false (default: nothing is kept)',
    )
    group.add_argument(
        "--record-megabytes",
        type=whole,
        metavar="N",
        help=f"most megabytes of these files; the oldest go first (default: {_MEGABYTES})",
    )
    group.add_argument(
        "--record-mask",
        action="append",
        default=[],
        metavar="REGEX",
        help="what this matches is masked before anything is kept; may be given several times",
    )


@contextmanager
def recording(options: argparse.Namespace, allowed: Settings) -> Iterator[list[Observer]]:
    """The observer that records requests, if there is one. Raises ValueError for flags that contradict each other."""
    if options.record is None:
        if options.record_mask or options.record_megabytes is not None:
            raise ValueError("--record-mask and --record-megabytes work only with --record FOLDER: add it")
        yield []
        return
    megabytes = _MEGABYTES if options.record_megabytes is None else options.record_megabytes
    if megabytes < 1:
        raise ValueError(f"--record-megabytes must be at least 1, got {megabytes}")
    owners, masks = _agreed(allowed, options.no_auth), _masks(options.record_mask)
    from parlay.serve.observe.recording import TrafficRecord

    record = TrafficRecord(options.record, owners, most_bytes=megabytes * 1_000_000, masks=masks)
    try:
        yield [record.finished]
    finally:
        record.close()


def _agreed(allowed: Settings, open_to_all: bool) -> frozenset[str]:
    """Hashes of the keys whose owners agreed; without keys, the one who starts the server is its only user."""
    from parlay.serve.guard.auth import digest

    if open_to_all:
        raise ValueError("--record can't be used with --no-auth, because users have not agreed to it: use API keys")
    if not allowed.keys:
        return frozenset({""})
    owners = frozenset(digest(key) for key, limits in allowed.own_limits.items() if limits.record)
    if not owners:
        raise ValueError("--record: no API key has record=1: add it in --api-key-file to the keys whose users agreed")
    return owners


def _masks(patterns: Sequence[str]) -> list[re.Pattern[str]]:
    found = []
    for pattern in patterns:
        try:
            mask = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"--record-mask {pattern} is not a regular expression: {error}") from None
        if mask.search(""):  # it would mask between all letters
            raise ValueError(f"--record-mask '{pattern}' matches a text without letters: write + in place of *")
        found.append(mask)
    return found
