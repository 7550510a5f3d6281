"""Kills one replica after another (kill -9) under 16 streams, and checks that no request is lost and no text differs.

python -m benchmarks.serving.kills --kills 1000    # continues an earlier run; an hour
python -m benchmarks.serving.kills --quick         # a short run, to see that it works
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.commands import RESULTS, one_line_errors, write_page
from benchmarks.options import command_parser
from benchmarks.pages import about, table
from benchmarks.serving.fleet import MINI, STREAMS, Fleet, fleet, told
from parlay.bench.provenance import provenance

TOKENS = 96
_EVERY = 25
"""A row is written after this many kills."""
_PATIENCE = 60.0
"""After this many seconds a replica is killed even if too few streams have begun."""
_SHOWN = ("kills", "streams", "lost", "different", "resumed", "retried", "broken", "seconds")


@dataclass(slots=True)
class Counts:
    """The results of all kills in all runs. ``resumed`` counts streams that another replica continued."""

    kills: int = 0
    streams: int = 0
    lost: int = 0
    different: int = 0
    resumed: int = 0
    retried: int = 0
    broken: int = 0
    seconds: float = 0.0


class Soak:
    """Kills replicas of one fleet under streams, and compares each text with the text of an undisturbed run.

    ``before`` has the counts of earlier runs.
    """

    def __init__(self, place: Fleet, before: Counts, tokens: int) -> None:
        self._place, self._before, self._tokens = place, before, tokens
        self._counts = Counts()
        self._began = time.monotonic()

    def counts(self) -> Counts:
        """Return the counts of all runs."""
        now = self._counts
        now.resumed, now.retried = self._place.count("streams_resumed"), self._place.count("retries")
        now.broken, now.seconds = self._place.count("streams_broken"), round(time.monotonic() - self._began)
        return Counts(**{name: value + getattr(now, name) for name, value in asdict(self._before).items()})

    async def run(self, kills: int, most: float, note: Callable[[Counts], None]) -> None:
        """Kill until there were ``kills`` kills in all runs, or for ``most`` seconds."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with httpx.AsyncClient(base_url=self._place.url, timeout=300, limits=limits) as client:
            expected = [await told(client, number, self._tokens) for number in range(STREAMS)]
            while self._before.kills + self._counts.kills < kills and time.monotonic() < self._began + most:
                await self._round(client, expected)
                if not self._counts.kills % _EVERY:
                    note(self.counts())

    async def _round(self, client: httpx.AsyncClient, expected: Sequence[str]) -> None:
        """Kill a replica when at least two are ready, so that one is left; others may still be starting."""
        while len(await asyncio.to_thread(self._place.ready)) < 2:
            await asyncio.sleep(0.05)
        begun = asyncio.Semaphore(0)
        streams = [asyncio.create_task(told(client, number, self._tokens, begun)) for number in range(STREAMS)]
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                for _ in range(random.randint(1, STREAMS)):
                    await begun.acquire()
        with suppress(ProcessLookupError):  # one that has been killed already
            ready = await asyncio.to_thread(self._place.ready)
            os.kill(self._place.processes[random.choice(ready)], signal.SIGKILL)
            self._counts.kills += 1
        for answer, text in zip(await asyncio.gather(*streams, return_exceptions=True), expected, strict=True):
            if isinstance(answer, BaseException):
                print(f"lost: {type(answer).__name__} {answer}", file=sys.stderr)
            self._counts.lost += isinstance(answer, BaseException)
            self._counts.different += isinstance(answer, str) and answer != text
        self._counts.streams += STREAMS


def page(header: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Write the page, with a table over all runs."""
    row, commits = rows[-1], ", ".join(dict.fromkeys(each["commit"] for each in rows))
    text = (
        f"kill -9 of one of {row['replicas']} replicas of `{MINI}` under {STREAMS} streams of {row['tokens']} tokens, "
        "again and again: each time as soon as two replicas are ready, and some of the streams have begun. Commits: "
        f"{commits}."
    )
    lines = [
        "# Replicas that are killed",
        "",
        about(header),
        "",
        *([header["note"], ""] if "note" in header else []),
        text,
        "",
    ]
    return "\n".join([*lines, *table(_SHOWN, [tuple(f"{row[name]:g}" for name in _SHOWN)])]) + "\n"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser("serving.kills", __doc__)
    parser.add_argument(
        "--kills", type=int, default=1000, metavar="N", help="kills in all runs together (default: 1000)"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, metavar="N", help="time limit of this run (default: no limit)"
    )
    parser.add_argument("--replicas", type=int, default=3, metavar="N", help="replicas (default: 3)")
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, metavar="N", help=f"tokens of each stream (default: {TOKENS})"
    )
    parser.add_argument("--quick", action="store_true", help="three kills: to see that it works")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file of results, which a run continues; tables are written as .md"
    )
    return parser.parse_args(arguments)


@one_line_errors("serving.kills")
def main(arguments: Sequence[str] | None = None) -> None:
    """Soak, and write rows and page."""
    options = parse(arguments)
    out: Path = options.out or RESULTS / f"kills{'-quick' if options.quick else ''}.jsonl"
    known = [] if options.quick or not out.exists() else list(map(json.loads, out.read_text("utf-8").splitlines()))
    now = provenance("python -m benchmarks.serving.kills")
    commit = now["commit"]
    header, *rows = known or [now]
    before = Counts(**{name: rows[-1][name] for name in asdict(Counts())}) if rows else Counts()

    def note(counts: Counts) -> None:
        rows.append({"replicas": options.replicas, "tokens": options.tokens, **asdict(counts), "commit": commit})
        print(json.dumps(rows[-1]), flush=True)
        out.write_text("".join(json.dumps(each) + "\n" for each in (header, *rows)), encoding="utf-8")

    with fleet(MINI, options.replicas) as place:
        soak = Soak(place, before, options.tokens)
        asyncio.run(soak.run(3 if options.quick else options.kills, 60 * options.minutes, note))
        note(soak.counts())
    write_page(out, page(header, rows))


if __name__ == "__main__":
    main()
