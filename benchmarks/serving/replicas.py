"""Two replicas behind a gateway: what it costs a request, what two are worth, and what cut lines and kill -9 do.

python -m benchmarks.serving.replicas                   # all parts; results/replicas.jsonl and .md
python -m benchmarks.serving.replicas --only kills --kills 1000      # the long soak; an hour on two idle cores
python -m benchmarks.serving.replicas --quick           # does it work?
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import httpx

from benchmarks.commands import RESULTS, write_page
from benchmarks.pages import about, table
from benchmarks.serving.cutting import cut_lines
from benchmarks.serving.served import PATIENCE, served
from parlay.bench.provenance import provenance

MINI = "parlay-mini"
STREAMS = 16
TOKENS = 400
GOAL_MS = 1.0
_SEED_KINDS = 4
"""Every so many questions one is greedy; the others are sampled."""


@dataclass(slots=True)
class Fleet:
    """A `parlay serve --replicas`: where it listens, and the process of each replica."""

    url: str
    processes: dict[int, int] = field(default_factory=dict)

    def ready(self) -> list[int]:
        """Numbers of the replicas that take requests."""
        try:
            with urlopen(f"{self.url}/health", timeout=10) as answer:
                states: dict[str, str] = json.load(answer)["replicas"]
        except OSError:
            return []
        return [int(number) for number, state in states.items() if state == "ready"]

    def count(self, name: str) -> int:
        """A counter of the gateway."""
        with urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return int(sum(float(line.split()[-1]) for line in lines if line.startswith(f"parlay_gateway_{name}_total")))


@contextmanager
def fleet(model: str, replicas: int, *words: str) -> Iterator[Fleet]:
    """Several replicas, until the block ends. Raises ValueError when they do not start."""
    flags = ("--replicas", str(replicas), "--port", "0", "--log-level", "info", "--router-memory", "off")
    command = (sys.executable, "-m", "parlay", "serve", model, *flags, *words)
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        known: dict[int, int] = {}
        threading.Thread(target=_note_processes, args=(process.stderr, known), daemon=True).start()
        try:
            welcome = process.stdout.readline()
            if not welcome:
                raise ValueError(f"parlay serve --replicas {replicas} did not start")
            yield Fleet(welcome.split()[-1], known)
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()


def _note_processes(lines: Any, known: dict[int, int]) -> None:
    for line in lines:
        if match := re.search(r"replica (\d+) is process (\d+)", line):
            known[int(match[1])] = int(match[2])
        elif " WARNING " in line and " has ended" not in line and " is lost" not in line:
            print(line.rstrip(), file=sys.stderr)


# ----------------------------------------------------------------------------------------------------------- questions


def question(number: int, tokens: int) -> tuple[str, dict[str, Any]]:
    """One of some streams: texts and chats, greedy and sampled, some with several choices or log-probabilities."""
    body: dict[str, Any] = {"model": MINI, "stream": True, "max_tokens": tokens, "seed": number, "ignore_eos": True}
    if number % _SEED_KINDS == 0:
        body["temperature"] = 0
    if number % 3 == 0:
        said = [{"role": "user", "content": f"Tell me about number {number}."}]
        return "/v1/chat/completions", {**body, "messages": said, "presence_penalty": 0.2 * (number % 2)}
    more = {"n": 2, "max_tokens": tokens // 2} if number % 5 == 0 else {"logprobs": 1} if number % 7 == 0 else {}
    return "/v1/completions", {**body, "prompt": f"Once upon a time, number {number}", **more}


async def told(client: httpx.AsyncClient, number: int, tokens: int, begun: asyncio.Semaphore | None = None) -> str:
    """What a client makes of the stream: texts, roles, ends, log-probabilities. Raises ValueError for no good end.

    ``begun`` is released at the third event.
    """
    path, body = question(number, tokens)
    texts: dict[str, str] = {}
    done, events = False, 0
    async with client.stream("POST", path, json=body) as answer:
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}: {(await answer.aread()).decode()[:200]}")
        async for line in answer.aiter_lines():
            done = done or line == "data: [DONE]"
            if line.startswith("data: {"):
                _add(json.loads(line.removeprefix("data: ")), texts)
                events += 1
                if begun is not None and events == 3:
                    begun.release()
    if not done:
        raise ValueError("the stream broke off")
    return json.dumps(texts, sort_keys=True)


def _add(chunk: dict[str, Any], texts: dict[str, str]) -> None:
    if "error" in chunk:
        raise ValueError(chunk["error"]["message"])
    for choice in chunk["choices"]:
        own, delta = choice["index"], choice.get("delta", {})
        said = choice.get("text", "") + (delta.get("content") or "")
        rows = (choice["logprobs"] or {}).get("tokens", [])
        role, end = delta.get("role", ""), choice["finish_reason"] or ""
        for name, text in (("text", said), ("role", role), ("end", end), ("logprobs", "".join(rows))):
            texts[f"{own} {name}"] = texts.get(f"{own} {name}", "") + text


# ----------------------------------------------------------------------------------------------------------- the parts


async def soak(place: Fleet, kills: int, tokens: int, note: Any, most: float = math.inf) -> dict[str, Any]:
    """Kill a replica under 16 streams, let them end, compare each text with that of the first time; again and again.

    A kill waits until two replicas are ready, so that one is left; others may still be starting. It ends after so many
    kills, or ``most`` seconds.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=place.url, timeout=300, limits=limits) as client:
        expected = [await told(client, number, tokens) for number in range(STREAMS)]
        counts = dict.fromkeys(("kills", "streams", "lost", "different"), 0)
        began = time.monotonic()

        def row(part: str) -> dict[str, Any]:
            resumed, seconds = place.count("streams_resumed"), round(time.monotonic() - began)
            return {"part": part, "tokens": tokens, **counts, "resumed": resumed, "seconds": seconds}

        while counts["kills"] < kills and time.monotonic() < began + most:
            while len(await asyncio.to_thread(place.ready)) < 2:
                await asyncio.sleep(0.05)
            begun = asyncio.Semaphore(0)
            streams = [asyncio.create_task(told(client, number, tokens, begun)) for number in range(STREAMS)]
            for _ in range(random.randint(1, STREAMS)):
                await begun.acquire()
            with suppress(ProcessLookupError):  # one that has been killed already
                os.kill(place.processes[random.choice(await asyncio.to_thread(place.ready))], signal.SIGKILL)
                counts["kills"] += 1
            for answer, text in zip(await asyncio.gather(*streams, return_exceptions=True), expected, strict=True):
                if isinstance(answer, BaseException):
                    print(f"lost: {type(answer).__name__} {answer}", file=sys.stderr)
                counts["lost"] += isinstance(answer, BaseException)
                counts["different"] += isinstance(answer, str) and answer != text
            counts["streams"] += STREAMS
            if counts["kills"] % 25 == 0:
                note(row("kills"))
        more = {"retried": place.count("retries"), "broken": place.count("streams_broken")}
        return {**row("kills, all"), **more}


async def cut(server: str, cuts: int, tokens: int) -> dict[str, Any]:
    """Cut the lines to two replicas at random bytes, and compare each text with that of a line that holds."""
    place = urlsplit(server)
    assert place.hostname is not None
    assert place.port is not None
    async with httpx.AsyncClient(base_url=server, timeout=120) as direct:
        expected = [await told(direct, number, tokens) for number in range(STREAMS)]
    counts = {"streams": 0, "lost": 0, "different": 0}
    async with cut_lines(place.hostname, place.port, 2, 12_000) as (lines, urls):
        with _gateway(*urls, flags=("--retries", "50", "--wait-seconds", "60", "--log-level", "error")) as (url, _):
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


def overhead(direct: str, gateway: str, process: int, rounds: int, *, stream: bool) -> dict[str, Any]:
    """The same short request in turn to a replica and through the gateway, on kept connections: milliseconds each.

    The processor time of the gateway's ``process`` does not depend on what else runs on the machine.
    """
    body = {"model": MINI, "prompt": "The sea is", "max_tokens": 4, "temperature": 0, "stream": stream}
    seconds: dict[str, list[float]] = {direct: [], gateway: []}
    spent = _processor_seconds(process)
    with httpx.Client() as client:
        for _ in range(rounds):
            for url in (direct, gateway):
                began = time.perf_counter()
                client.post(f"{url}/v1/completions", json=body).raise_for_status()
                seconds[url].append(1e3 * (time.perf_counter() - began))
    pairs = [through - alone for alone, through in zip(*seconds.values(), strict=True)]
    low, _, high = quantiles(pairs, n=4)
    return {
        "part": "overhead",
        "stream": stream,
        "requests": rounds,
        "direct_ms": round(median(seconds[direct]), 3),
        "gateway_ms": round(median(seconds[gateway]), 3),
        "overhead_ms": round(median(pairs), 3),
        "quartiles_ms": [round(low, 3), round(high, 3)],
        "processor_ms": round(1e3 * (_processor_seconds(process) - spent) / rounds, 3),
    }


def _processor_seconds(process: int) -> float:
    """Seconds that the process's main thread has computed."""
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1e9


async def throughput(url: str, replicas: int, tokens: int, requests: int) -> dict[str, Any]:
    """Tokens per second of 16 streams at once."""
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
    """The tables."""
    beside = f" Beside {header['beside']}." if "beside" in header else ""
    lines = ["# Replicas behind a gateway", "", about(header) + beside, ""]
    costs = [row for row in rows if row["part"] == "overhead"]
    if costs:
        lines += [f"What the gateway adds to a request of `{MINI}`, median of pairs; the goal is {GOAL_MS:g} ms.", ""]
        lines += table(
            (
                "answer",
                "requests",
                "direct, ms",
                "through the gateway, ms",
                "added, ms",
                "quartiles",
                "its processor time",
            ),
            [
                (
                    "streamed" if row["stream"] else "whole",
                    str(row["requests"]),
                    f"{row['direct_ms']:.2f}",
                    f"{row['gateway_ms']:.2f}",
                    f"{row['overhead_ms']:.2f}",
                    f"{row['quartiles_ms'][0]:.2f} to {row['quartiles_ms'][1]:.2f}",
                    f"{row['processor_ms']:.2f} ms",
                )
                for row in costs
            ],
        )
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
    soaks = [row for row in rows if row["part"] == "kills, all"]
    if soaks:
        names = ("kills", "streams", "lost", "different", "resumed", "seconds")
        lines += ["", f"kill -9 of one of the replicas under {STREAMS} streams, again and again.", ""]
        lines += table(names, [tuple(f"{row[name]:g}" for name in names) for row in soaks])
    return "\n".join(lines).rstrip() + "\n"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.replicas", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="kills of the soak (default: 20)")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="N", help="most time of the soak")
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="replicas of the soak (default: 2)")
    parser.add_argument("--cuts", type=int, default=1000, metavar="N", help="cuts of lines (default: 1000)")
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help=f"of each stream (default: {TOKENS})")
    parser.add_argument("--only", choices=("overhead", "throughput", "cuts", "kills"), help="one part (default: all)")
    parser.add_argument("--quick", action="store_true", help="few requests: to see that it works")
    parser.add_argument("--out", type=Path, metavar="FILE", help="results; the tables go beside it, as .md")
    return parser.parse_args(arguments)


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
        with served(MINI, "--router-memory", "off") as direct, _gateway(direct) as (gateway, process):
            for stream in (False, True):
                overhead(direct, gateway, process, 30, stream=stream)
                note(overhead(direct, gateway, process, 100 if options.quick else 1000, stream=stream))
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
    if options.only in (None, "kills"):
        rows[:] = [row for row in rows if not row["part"].startswith("kills")]
        with fleet(MINI, options.replicas) as place:
            kills = 3 if options.quick else options.kills
            note(asyncio.run(soak(place, kills, options.tokens, note, 60 * options.minutes)))
    write_page(out, page(header, rows))


def _known(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()[1:]] if out.exists() else []


@contextmanager
def _gateway(*replicas: str, flags: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """A gateway: its address and its process."""
    named = [word for url in replicas for word in ("--replica", url)]
    command = (sys.executable, "-m", "parlay", "gateway", *named, "--port", "0", *flags)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1], process.pid
        finally:
            process.terminate()
            process.wait(PATIENCE)


if __name__ == "__main__":
    main()
