"""Starts replicas of a model behind a gateway, and sends them streams."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.request import urlopen

import httpx

from benchmarks.serving.served import started

MINI = "parlay-mini"
STREAMS = 16
_SEED_KINDS = 4
"""One request of this many is greedy; the others are sampled."""


@dataclass(slots=True)
class Fleet:
    """A running `parlay serve --replicas`: its address, and the process number of each replica."""

    url: str
    processes: dict[int, int] = field(default_factory=dict)

    def ready(self) -> list[int]:
        """Return the numbers of the replicas that take requests."""
        try:
            with urlopen(f"{self.url}/health", timeout=10) as answer:
                states: dict[str, str] = json.load(answer)["replicas"]
        except OSError:
            return []
        return [int(number) for number, state in states.items() if state == "ready"]

    def count(self, name: str) -> int:
        """Return the value of one of the gateway's counters."""
        with urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return int(sum(float(line.split()[-1]) for line in lines if line.startswith(f"parlay_gateway_{name}_total")))


@contextmanager
def fleet(model: str, replicas: int, *words: str) -> Iterator[Fleet]:
    """Start several replicas, and end them afterwards. Raises ValueError if they do not start."""
    flags = ("--replicas", str(replicas), "--port", "0", "--log-level", "info", "--router-memory", "off")
    known: dict[int, int] = {}
    with started("serve", model, *flags, *words, read_errors=partial(_note_processes, known=known)) as (url, _):
        yield Fleet(url, known)


def _note_processes(lines: Iterable[str], known: dict[int, int]) -> None:
    for line in lines:
        if match := re.search(r"replica (\d+) is process (\d+)", line):
            known[int(match[1])] = int(match[2])
        elif " WARNING " in line and " has ended" not in line and " is lost" not in line:
            print(line.rstrip(), file=sys.stderr)


@contextmanager
def gateway(*replicas: str, flags: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """Start a `parlay gateway` in front of some servers. Yield its address and process number."""
    named = [word for url in replicas for word in ("--replica", url)]
    with started("gateway", *named, "--port", "0", *flags) as found:
        yield found


def question(number: int, tokens: int) -> tuple[str, dict[str, Any]]:
    """Return path and body of a stream: texts and chats, greedy and sampled, some with two choices or
    log-probabilities."""
    body: dict[str, Any] = {"model": MINI, "stream": True, "max_tokens": tokens, "seed": number, "ignore_eos": True}
    if number % _SEED_KINDS == 0:
        body["temperature"] = 0
    if number % 3 == 0:
        said = [{"role": "user", "content": f"Tell me about number {number}."}]
        return "/v1/chat/completions", {**body, "messages": said, "presence_penalty": 0.2 * (number % 2)}
    more = {"n": 2, "max_tokens": tokens // 2} if number % 5 == 0 else {"logprobs": 1} if number % 7 == 0 else {}
    return "/v1/completions", {**body, "prompt": f"Once upon a time, number {number}", **more}


async def told(client: httpx.AsyncClient, number: int, tokens: int, begun: asyncio.Semaphore | None = None) -> str:
    """Read a stream and return its texts, roles, ends and log-probabilities as JSON.

    ``begun`` is released at the third event. Raises ValueError if the stream does not end well.
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
