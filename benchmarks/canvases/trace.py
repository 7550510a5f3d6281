"""Sends a mixed trace of requests to a server: with one strategy for all requests, and with what each request
allows."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx

from benchmarks.canvases.texts import EXACT, TOKENS
from benchmarks.serving.served import served

AS_ALLOWED = "as each request allows"
_BEFORE = 24
"""The number of requests of each kind that are sent unmeasured, so that the server learns the strategies' costs."""
LIMIT = 120.0
"""The time limit of one answer, in seconds."""


@dataclass(slots=True)
class Played:
    """The measurements of one way to decode the trace, by round.

    ``seconds`` is wall time, ``processor`` the server's CPU time in seconds, and ``answers`` the answers to all
    requests.
    """

    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    answers: list[list[dict[str, Any]]] = field(default_factory=list)


def serve(options: argparse.Namespace) -> None:
    """Send the trace to a server, round after round, in each way in turn: with each strategy named, and as each request
    allows.

    Look-ups and JSON allow ``--floor``; sums ask for the exact text. Each way has its own cache salt, so no way finds
    the prompts of another in the prefix cache. Before the first round the server learns each way's costs from other
    requests.
    """
    rows = [json.loads(line) for line in options.data.read_text(encoding="utf-8").splitlines()]
    trace, others = mixture(rows, options.prompts, options.kinds)
    floor = ("--certificate", str(options.certificate)) if options.certificate else ()
    words = (*floor, "--strategy", options.usual, "--audit-share", str(options.audit_share), "--threads", "1")
    ways, found = (*options.strategies, AS_ALLOWED), dict[str, Played]()
    with served(f"model={options.model}", *words) as url, httpx.Client(base_url=url, timeout=LIMIT) as client:
        for way in ways:
            _play(client, options, others, way, "before")
            found[way] = Played()
        for turn in range(options.rounds):
            for place in range(len(ways)):  # rounds begin with different ways
                way = ways[(turn + place) % len(ways)]
                began, spent = time.perf_counter(), _metric(client, "process_cpu_seconds_total")
                found[way].answers.append(_play(client, options, trace, way, f"round {turn}"))
                found[way].seconds.append(time.perf_counter() - began)
                found[way].processor.append(_metric(client, "process_cpu_seconds_total") - spent)
        audits = [_metric(client, f"parlay_audits{each}_total") for each in ("", "_disagreed")]
    for way in ways:
        own = {"usual": options.usual, "audits": audits} if way == AS_ALLOWED else {}
        print(json.dumps(_served(way, trace, found, ways[0]) | own))


def mixture(
    rows: Sequence[dict[str, Any]], count: int, kinds: Sequence[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return ``count`` requests whose kinds repeat the sequence ``kinds``, and some further requests.

    Raises ValueError if there are too few rows of a kind.
    """
    turns, trace, others = count // len(kinds), list[list[dict[str, Any]]](), list[dict[str, Any]]()
    for kind, times in Counter(kinds).items():
        own, wanted = [row for row in rows if row["kind"] == kind], turns * times
        if len(own) <= wanted:
            raise ValueError(f"{len(own)} rows of kind {kind} are too few for {count} requests: write more")
        trace += [own[n * turns : (n + 1) * turns] for n in range(times)]
        others += own[wanted:][:_BEFORE]
    return [row for turn in zip(*trace, strict=True) for row in turn], others


def _play(
    client: httpx.Client, options: argparse.Namespace, rows: Sequence[Mapping[str, Any]], way: str, salt: str
) -> list[dict[str, Any]]:
    """Send all requests, ``options.clients`` at once, and return their answers."""

    def ask(row: Mapping[str, Any]) -> dict[str, Any]:
        allows = "seed" if row["kind"] == EXACT else options.floor
        own = {"exactness": allows} if way == AS_ALLOWED else {"strategy": way}
        body = {"model": "model", "prompt": row["prompt"], "max_tokens": TOKENS[row["kind"]], "temperature": 0}
        sent = client.post("/v1/completions", json={**body, "cache_salt": f"{way}, {salt}", **own})
        answer = sent.raise_for_status().json()
        tokens, told = answer["usage"]["completion_tokens"], answer["parlay"]
        steps = round(tokens / told["tokens_per_step"]) if told["tokens_per_step"] else 0
        return {"text": answer["choices"][0]["text"], "way": told["strategy"], "tokens": tokens, "steps": steps}

    with ThreadPoolExecutor(options.clients) as pool:
        return [*pool.map(ask, rows)]


def _metric(client: httpx.Client, name: str) -> float:
    """Return the sum of a metric of the server; 0 if the server has no metric of that name."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def _served(way: str, rows: Sequence[Mapping[str, Any]], found: Mapping[str, Played], first: str) -> dict[str, Any]:
    """Summarise one way as a row for the whole trace.

    ``right`` counts correct answers, and ``same`` counts answers equal to those of the way ``first``. Both, and tokens
    and steps, are summed over all rounds. A ratio is the first way's seconds over this way's seconds in a round.
    """
    own, plain = found[way], found[first]
    every = [
        (row, answer, exact)
        for answers, texts in zip(own.answers, plain.answers, strict=True)
        for row, answer, exact in zip(rows, answers, texts, strict=True)
    ]
    said: dict[str, Any] = {"strategy": way, "prompts": len(rows), "rounds": len(own.seconds)}
    said |= {name: sum(answer[name] for _, answer, _ in every) for name in ("tokens", "steps")}
    for name, mine, theirs in (
        ("seconds", own.seconds, plain.seconds),
        ("processor_seconds", own.processor, plain.processor),
    ):
        ratios = [round(b / a, 3) for a, b in zip(mine, theirs, strict=True)]
        said |= {name: [round(each, 3) for each in mine], f"{name}_ratios": ratios, f"{name}_ratio": median(ratios)}
    for kind in sorted({row["kind"] for row in rows}):
        each = [(row, answer, exact) for row, answer, exact in every if row["kind"] == kind]
        said[kind] = {
            "of": len(each),
            "right": sum(answer["text"].strip() == row["answer"].strip() for row, answer, _ in each),
            "same": sum(answer["text"] == exact["text"] for _, answer, exact in each),
            "steps": sum(answer["steps"] for _, answer, _ in each),
            "ways": dict(Counter(answer["way"] for _, answer, _ in each)),
        }
    return said
