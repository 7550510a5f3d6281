"""Measures a gateway: what it adds to a request, the throughput of two replicas, and what cut connections do.

python -m benchmarks.serving.replicas                    # all parts; results/replicas.jsonl and .md
python -m benchmarks.serving.replicas --only overhead    # two minutes
python -m benchmarks.serving.replicas --quick            # few requests, to see that it works
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.commands import RESULTS, one_line_errors, write_page
from benchmarks.options import command_parser
from benchmarks.pages import about, table
from benchmarks.serving.cutting import cut_lines
from benchmarks.serving.fleet import MINI, STREAMS, Fleet, fleet, gateway, told
from benchmarks.serving.served import served
from parlay.bench.host import busy_cores
from parlay.bench.provenance import provenance

TOKENS = 400
GOAL_MS = 1.0
_SHORT, _LONG = 4, 68
"""Tokens of the answers whose overhead is measured. The long ones show what each event of a stream adds."""


async def cut(server: str, cuts: int, tokens: int) -> dict[str, Any]:
    """Cut the connections to two replicas at random bytes, and compare each text with that of an uncut connection."""
    place = urlsplit(server)
    assert place.hostname is not None
    assert place.port is not None
    async with httpx.AsyncClient(base_url=server, timeout=120) as direct:
        expected = [await told(direct, number, tokens) for number in range(STREAMS)]
    counts = {"streams": 0, "lost": 0, "different": 0}
    async with cut_lines(place.hostname, place.port, 2, 12_000) as (lines, urls):
        with gateway(*urls, flags=("--retries", "50", "--wait-seconds", "60", "--log-level", "error")) as (url, _):
            async with httpx.AsyncClient(base_url=url, timeout=120) as client:

                async def ask(first: int) -> None:
                    number = first
                    while sum(line.cuts for line in lines) < cuts:
                        try:
                            counts["different"] += await told(client, number, tokens) != expected[number]
                        except (ValueError, httpx.HTTPError) as error:
                            counts["lost"] += 1
                            print(f"lost: {type(error).__name__} {error}", file=sys.stderr)
                        counts["streams"] += 1
                        number = (number + 1) % STREAMS

                await asyncio.gather(*(ask(first) for first in range(4)))
            resumed = Fleet(url).count("streams_resumed")
    return {"part": "cuts", "cuts": sum(line.cuts for line in lines), **counts, "resumed": resumed}


@contextmanager
def canned() -> Iterator[str]:
    """Start a replica that answers at once, and yield its address."""
    command = (sys.executable, "-m", "benchmarks.serving.canned")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def overhead(replica: str, direct: str, rounds: int, note: Callable[[dict[str, Any]], None]) -> None:
    """Send short requests in turn to a replica and through a gateway, on kept connections, and note milliseconds of
    each.

    The CPU time of the gateway's process hardly depends on what else runs on the machine.
    """
    with gateway(direct) as (through, process):
        clients = [HTTPConnection(urlsplit(url).netloc) for url in (direct, through)]
        for stream, tokens in ((False, _SHORT), (True, _SHORT), (True, _LONG)):
            _ask_both(clients, process, 30, stream=stream, tokens=tokens)
            count = rounds if tokens == _SHORT else max(20, rounds // 10)
            note({"part": "overhead", "replica": replica, **_ask_both(clients, process, count, stream, tokens)})
        for client in clients:
            client.close()


def _ask_both(
    clients: Sequence[HTTPConnection], process: int, rounds: int, stream: bool, tokens: int
) -> dict[str, Any]:
    body = {"model": MINI, "prompt": "The sea is", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    content, headers = json.dumps({**body, "stream": stream}), {"Content-Type": "application/json"}
    seconds: list[list[float]] = [[], []]
    spent, busy = _processor_seconds(process), busy_cores()
    for _ in range(rounds):
        for client, times in zip(clients, seconds, strict=True):
            began = time.perf_counter()
            client.request("POST", "/v1/completions", content, headers)
            answer = client.getresponse()
            answer.read()
            if answer.status != 200:
                raise ValueError(f"a replica answered with status {answer.status}")
            times.append(1e3 * (time.perf_counter() - began))
    pairs = [through - alone for alone, through in zip(*seconds, strict=True)]
    low, _, high = quantiles(pairs, n=4)
    return {
        "stream": stream,
        "tokens": tokens,
        "requests": rounds,
        "direct_ms": round(median(seconds[0]), 3),
        "gateway_ms": round(median(seconds[1]), 3),
        "overhead_ms": round(median(pairs), 3),
        "quartiles_ms": [round(low, 3), round(high, 3)],
        "processor_ms": round(1e3 * (_processor_seconds(process) - spent) / rounds, 3),
        "busy_cores": round(busy, 1),
    }


def _processor_seconds(process: int) -> float:
    """Return the CPU seconds of the process's main thread."""
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1e9


async def throughput(url: str, replicas: int, tokens: int, requests: int) -> dict[str, Any]:
    """Measure tokens per second of 16 streams at once."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        numbers = iter(range(requests))

        async def worker() -> None:
            for number in numbers:
                await told(client, number % STREAMS, tokens)

        await asyncio.gather(*(told(client, number, 16) for number in range(STREAMS)))
        began = time.monotonic()
        await asyncio.gather(*(worker() for _ in range(STREAMS)))
        seconds = time.monotonic() - began
    return {
        "part": "throughput",
        "replicas": replicas,
        "requests": requests,
        "tokens_per_second": round(requests * tokens / seconds),
    }


# ------------------------------------------------------------------------------------------------------------ the page


def page(header: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Write the page."""
    beside = f" Beside {header['beside']}." if "beside" in header else ""
    lines = ["# Replicas behind a gateway", "", about(header) + beside, ""]
    costs = [row for row in rows if row["part"] == "overhead"]
    if costs:
        lines += [*_costs(costs), ""]
    rates = [row for row in rows if row["part"] == "throughput"]
    if rates:
        lines += ["", "Tokens per second of 16 streams at once; all replicas share the cores.", ""]
        lines += table(
            ("replicas", "requests", "tokens/s"),
            [(str(row["replicas"]), str(row["requests"]), str(row["tokens_per_second"])) for row in rates],
        )
    cuts = [row for row in rows if row["part"] == "cuts"]
    if cuts:
        found = ("cuts", "streams", "lost", "different", "resumed")
        lines += ["", "Lines to two replicas, cut at random bytes of the answers.", ""]
        lines += table(found, [tuple(f"{row[name]:g}" for name in found) for row in cuts])
    return "\n".join(lines).rstrip() + "\n"


def _costs(rows: Sequence[dict[str, Any]]) -> list[str]:
    head = ("replica", "answer", "requests", "direct, ms", "through the gateway, ms", "added, ms", "quartiles")
    text = (
        "What the gateway adds to a request, median of pairs, and the processor time of its process. The goal is "
        f"{GOAL_MS:g} ms. `canned` answers at once, so the gateway's memory stays in the processor's caches."
    )
    cells = [
        (
            row["replica"],
            f"{row['tokens']} tokens, {'streamed' if row['stream'] else 'whole'}",
            str(row["requests"]),
            f"{row['direct_ms']:.2f}",
            f"{row['gateway_ms']:.2f}",
            f"{row['overhead_ms']:.2f}",
            f"{row['quartiles_ms'][0]:.2f} to {row['quartiles_ms'][1]:.2f}",
            f"{row['processor_ms']:.2f}",
            f"{row['busy_cores']:g}",
        )
        for row in rows
    ]
    return [text, "", *table((*head, "processor time, ms", "busy cores before"), cells)]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser("serving.replicas", __doc__)
    parser.add_argument("--cuts", type=int, default=1000, metavar="N", help="number of cuts (default: 1000)")
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, metavar="N", help=f"tokens of each stream (default: {TOKENS})"
    )
    parser.add_argument("--only", choices=("overhead", "throughput", "cuts"), help="one part (default: all)")
    parser.add_argument("--quick", action="store_true", help="few requests: to see that it works")
    parser.add_argument("--out", type=Path, metavar="FILE", help="results; the tables go beside it, as .md")
    return parser.parse_args(arguments)


@one_line_errors("serving.replicas")
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write rows and page."""
    options = parse(arguments)
    out: Path = options.out or RESULTS / f"replicas{'-quick' if options.quick else ''}.jsonl"
    header = provenance("python -m benchmarks.serving.replicas")
    rows = _known(out) if options.only else []

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        out.write_text("".join(json.dumps(each) + "\n" for each in (header, *rows)), encoding="utf-8")

    if options.only in (None, "overhead"):
        rows[:] = [row for row in rows if row["part"] != "overhead"]
        rounds = 100 if options.quick else 1000
        with canned() as direct:
            overhead("canned", direct, rounds, note)
        with served(MINI, "--router-memory", "off") as direct:
            overhead(MINI, direct, rounds, note)
    if options.only in (None, "throughput"):
        rows[:] = [row for row in rows if row["part"] != "throughput"]
        with served(MINI, "--router-memory", "off") as one:
            note(asyncio.run(throughput(one, 1, options.tokens, 32 if options.quick else 160)))
        with fleet(MINI, 2) as two:
            note(asyncio.run(throughput(two.url, 2, options.tokens, 32 if options.quick else 160)))
    if options.only in (None, "cuts"):
        rows[:] = [row for row in rows if row["part"] != "cuts"]
        with served(MINI, "--router-memory", "off") as one:
            note(asyncio.run(cut(one, 20 if options.quick else options.cuts, 64)))
    write_page(out, page(header, rows))


def _known(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()[1:]] if out.exists() else []


if __name__ == "__main__":
    main()
