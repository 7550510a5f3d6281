"""Sends hostile bodies to every operation of a server: none may end it, cause a fault, or delay its health check.

    python -m benchmarks.serving.hostile    # 10,000 bodies; writes results/hostile.md
    python -m benchmarks.serving.hostile --requests 500 --seed 3
    nice -n -10 python -m benchmarks.serving.hostile    # as root, if other processes use the machine

Operations and fields come from the server's OpenAPI document, so new ones are covered. The kinds of
`hostile_connections` come first, each while another client reads a stream; the page shows the stream's longest gap and
the growth of memory.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.commands import RESULTS, one_line_errors
from benchmarks.options import command_parser
from benchmarks.pages import about, table
from benchmarks.serving.hostile_bodies import Hostile, Maker
from benchmarks.serving.hostile_connections import KINDS, Stream
from benchmarks.serving.served import served
from parlay.bench.provenance import provenance

CLIENTS = 4
GOAL = 0.1
SETTLE = 12.0
"""Seconds that the server gets to free memory."""
_PATIENCE = 300.0


@dataclass(slots=True)
class Tally:
    """The server's answers by kind and status. ``wrong`` holds answers that it must never give."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    slowest: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, sent: Hostile, status: int, reply: bytes, seconds: float) -> None:
        with self.lock:
            self.statuses[sent.kind, status] += 1
            self.paths[f"{sent.method} {sent.path[:60]}"] += 1
            self.slowest[sent.kind] = max(self.slowest.get(sent.kind, 0.0), seconds)
            if status >= 500 or status == 0:
                self.wrong.append(
                    f"{sent.kind}: {sent.method} {sent.path} {sent.body[:300]!r}: {status} {reply[:300]!r}"
                )


def send(address: str, sent: Hostile) -> tuple[int, bytes]:
    """Send a request and return status and reply; status 0 if there is no reply.

    A server may answer and close the connection before it has read the whole request.
    """
    connection = http.client.HTTPConnection(address, timeout=_PATIENCE)
    try:
        headers = {"Content-Type": sent.content_type} if sent.content_type else {}
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.request(sent.method, sent.path, sent.body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    except (http.client.HTTPException, OSError) as error:
        return 0, repr(error).encode()
    finally:
        connection.close()


@contextmanager
def watched(address: str) -> Iterator[dict[str, Any]]:
    """Ask for `/health` from a process of its own while the block runs; then fill the mapping with how long answers
    took."""
    told: dict[str, Any] = {}
    command = (sys.executable, "-m", "benchmarks.serving.health", address)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield told
        told |= json.loads(process.communicate("\n")[0] or '{"longest": Infinity}')


def attack(address: str, maker: Maker, count: int) -> Tally:
    """Send ``count`` requests with several clients."""
    tally, drawn = Tally(), iter([None] * count)
    drawing = threading.Lock()

    def client() -> None:
        while True:
            with drawing:
                if next(drawn, 0) == 0:
                    return
                sent = maker.draw()
            began = time.perf_counter()
            tally.count(sent, *send(address, sent), time.perf_counter() - began)

    clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    return tally


def resident(address: str) -> tuple[int, int]:
    """Return the server's resident memory in bytes, and how much of it its models' caches hold."""
    _, told = send(address, Hostile("metrics", "GET", "/metrics"))
    lines = dict(line.rsplit(" ", 1) for line in told.decode().splitlines() if not line.startswith("#"))
    cached = sum(float(value) for name, value in lines.items() if name.startswith("parlay_cache_held_bytes"))
    return int(float(lines["process_resident_memory_bytes"])), int(cached)


def attack_otherwise(address: str) -> list[dict[str, Any]]:
    """Send the kinds that the OpenAPI document does not describe, one after another, each while a stream and health
    probes run."""
    host, port = address.rsplit(":", 1)
    rows = []
    for kind, run_it in KINDS.items():
        (before, _), began = resident(address), time.perf_counter()
        with watched(address) as health, Stream((host, int(port))) as stream:
            answer = run_it((host, int(port)))
        time.sleep(SETTLE)
        rows.append(
            {
                "kind": kind,
                "answer": answer,
                "seconds": time.perf_counter() - began - SETTLE,
                "health": health["longest"],
                "gap": stream.longest,
                "growth": resident(address)[0] - before,
            }
        )
    return rows


def broken(row: dict[str, Any]) -> bool:
    """Return whether the server gave a forbidden answer to a kind of request."""
    return any(word in row["answer"] for word in ("LOST", "TOOK", "50")) or row["health"] == float("inf")


def run(model: str, count: int, seed: int) -> dict[str, Any]:
    """Run the whole test, and return the results."""
    with served(model, "--max-tokens", "512") as url:
        address = url.removeprefix("http://")
        status, document = send(address, Hostile("document", "GET", "/openapi.json"))
        assert status == 200
        maker = Maker(json.loads(document), seed)
        with watched(address) as idle:
            time.sleep(5.0)
        start, cached = resident(address)
        others = attack_otherwise(address)
        with watched(address) as health:
            tally = attack(address, maker, count)
        time.sleep(SETTLE)
        end, cached_then = resident(address)
        alive, _ = send(address, Hostile("health", "GET", "/health"))
    return {
        "requests": count,
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "load": os.getloadavg()[1],
        "alive": alive == 200,
        "wrong": tally.wrong + [f"{row['kind']}: {row['answer']}" for row in others if broken(row)],
        "others": others,
        "grown": end - start,
        "cached": cached_then - cached,
        "idle": idle,
        "health": health,
        "statuses": sorted([*key, number] for key, number in tally.statuses.items()),
        "paths": dict(tally.paths.most_common(40)),
        "slowest": tally.slowest,
    }


def page(header: dict[str, Any], result: dict[str, Any]) -> str:
    """Write the page."""
    told = {name: result[name] for name in ("idle", "health")}
    kinds: dict[str, dict[int, int]] = {kind: {} for kind, _, _ in result["statuses"]}
    for kind, status, number in result["statuses"]:
        kinds[kind][status] = number
    answers = [(kind, ", ".join(f"{n} x {status}" for status, n in found.items())) for kind, found in kinds.items()]
    lines = [
        f"{result['requests']} requests, {CLIENTS} at once, drawn from the server's OpenAPI document. The server "
        f"{'is alive' if result['alive'] else 'DIED'}; faults of it (5xx, or no answer): {len(result['wrong'])}. "
        f"Goal: none, and `/health` within {1000 * GOAL:.0f} ms throughout. Server and clients ran at niceness "
        f"{result['niceness']}; the machine's load over the last five minutes was {result['load']:.1f}.",
        "",
        *table(
            ("`/health`", "asked", "median ms", "longest ms", "above the goal"),
            [
                (
                    name,
                    str(one["asked"]),
                    f"{1000 * one['median']:.1f}",
                    f"{1000 * one['longest']:.1f}",
                    str(one["slow"]),
                )
                for name, one in told.items()
            ],
        ),
        *table(("hostile by", "answers"), answers),
        "",
        f"Kinds that the document does not tell of, one after the other, beside a stream of another client. Over all "
        f"requests the server's resident memory grew by {result['grown'] / 1e6:.0f} MB, of which "
        f"{round(result['cached'] / 1e6)} MB are in its caches and drafters' states, which have a bound of their own.",
        "",
        *table(
            ("kind", "answers", "seconds", "longest `/health`, ms", "longest gap of the stream, ms", "memory, MB"),
            [
                (
                    row["kind"],
                    row["answer"],
                    f"{row['seconds']:.1f}",
                    f"{1000 * row['health']:.0f}",
                    f"{1000 * row['gap']:.0f}",
                    f"{round(row['growth'] / 1e6):+d}",
                )
                for row in result["others"]
            ],
        ),
        *(f"- {line}" for line in result["wrong"][:20]),
    ]
    return "\n".join(["# Hostile bodies", "", about(header), "", *lines]).rstrip() + "\n"


@one_line_errors("serving.hostile")
def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return 1 if a promise was broken."""
    parser = command_parser("serving.hostile", __doc__)
    parser.add_argument("--model", default="parlay-mini", help="model to serve (default: parlay-mini)")
    parser.add_argument("--requests", type=int, default=10_000, help="number of requests (default: 10,000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (default: 0)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page; the results are written beside it, as .json"
    )
    options = parser.parse_args(arguments)
    result = run(options.model, options.requests, options.seed)
    print(json.dumps(result, indent=1))
    out = options.out or (RESULTS / "hostile.md" if options.requests >= 10_000 else None)
    if out is not None:
        command = f"python -m benchmarks.serving.hostile --model {options.model} --requests {options.requests}"
        header = provenance(command)
        out.write_text(page(header, result), encoding="utf-8")
        out.with_suffix(".json").write_text(json.dumps(header | result, indent=1) + "\n", encoding="utf-8")
    return 0 if result["alive"] and not result["wrong"] and result["health"]["longest"] <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
