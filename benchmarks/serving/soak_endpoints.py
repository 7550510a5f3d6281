"""Every endpoint that answers in text, mixed, over HTTP: whole and streamed, by many strategies; nothing may differ.

    python -m benchmarks.serving.soak_endpoints --model smollm2-135m --requests 600

Each answer at temperature 0 is held against that of plain decoding, asked for alone before the others came.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks.serving.served import served

STRATEGIES = ("none", "prompt-lookup", "suffix-decoding", "trie-lookahead", "token-recycling", "adaptive-ngram")
PROMPTS = tuple(f"Repeat line {number}: the ferry leaves at ten past {number}." for number in range(1, 7))
TOKENS = 24


@dataclass(frozen=True, slots=True)
class Endpoint:
    """``body`` asks for an answer to a prompt; ``text`` is that of an object of the answer: whole, event or line."""

    path: str
    body: Callable[[str], dict[str, Any]]
    text: Callable[[dict[str, Any]], str]


def _said(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _completion(told: dict[str, Any]) -> str:
    return "".join(choice["text"] for choice in told["choices"])


def _chat(told: dict[str, Any]) -> str:
    choices = (choice.get("message") or choice["delta"] for choice in told["choices"])
    return "".join(choice.get("content") or "" for choice in choices)


def _response(told: dict[str, Any]) -> str:
    if told.get("object") == "response":
        return "".join(part["text"] for item in told["output"] for part in item["content"])
    return str(told["delta"]) if told["type"] == "response.output_text.delta" else ""


def _message(told: dict[str, Any]) -> str:
    if told["type"] == "message":
        return "".join(block["text"] for block in told["content"])
    return str(told["delta"]["text"]) if told["type"] == "content_block_delta" else ""


_OPTIONS = {"temperature": 0, "num_predict": TOKENS}
_SHORT = {"temperature": 0, "max_tokens": TOKENS}
ENDPOINTS = (
    Endpoint("/v1/completions", lambda prompt: {"prompt": prompt, **_SHORT}, _completion),
    Endpoint("/v1/chat/completions", lambda prompt: {"messages": _said(prompt), **_SHORT}, _chat),
    Endpoint(
        "/v1/responses", lambda prompt: {"input": prompt, "temperature": 0, "max_output_tokens": TOKENS}, _response
    ),
    Endpoint("/v1/messages", lambda prompt: {"messages": _said(prompt), **_SHORT}, _message),
    Endpoint(
        "/api/chat",
        lambda prompt: {"messages": _said(prompt), "options": _OPTIONS},
        lambda told: str(told["message"]["content"]),
    ),
    Endpoint("/api/generate", lambda prompt: {"prompt": prompt, "options": _OPTIONS}, lambda told: told["response"]),
)


def ask(address: str, endpoint: Endpoint, prompt: str, strategy: str, *, stream: bool) -> str:
    """The text of the answer. Raises ValueError for a refusal, OSError for none."""
    connection = http.client.HTTPConnection(address, timeout=300)
    body = {**endpoint.body(prompt), "strategy": strategy, "stream": stream}
    connection.request("POST", endpoint.path, json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    told = reply.read().decode()
    connection.close()
    if reply.status != 200:
        raise ValueError(f"{reply.status} {told[:200]}")
    lines = (line.removeprefix("data: ") for line in told.splitlines())
    return "".join(endpoint.text(json.loads(line)) for line in lines if line.startswith("{"))


def soak(address: str, requests: int, seed: int, clients: int) -> tuple[Counter[str], list[str]]:
    """How many answers each endpoint gave as plain decoding does, and what was lost or different."""
    pairs = list(itertools.product(ENDPOINTS, PROMPTS))
    plain = {(one.path, prompt): ask(address, one, prompt, "none", stream=False) for one, prompt in pairs}
    chance, same, wrong = random.Random(seed), Counter[str](), list[str]()
    planned = [(*chance.choice(pairs), chance.choice(STRATEGIES), chance.random() < 0.5) for _ in range(requests)]

    def one(endpoint: Endpoint, prompt: str, strategy: str, stream: bool) -> None:
        try:
            text = ask(address, endpoint, prompt, strategy, stream=stream)
        except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
            text = repr(error)
        if text == plain[endpoint.path, prompt]:
            same[endpoint.path] += 1
        else:
            wrong.append(f"{endpoint.path} {strategy} stream={stream}: {text!r}")

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda planned: one(*planned), planned))
    return same, wrong


def main(arguments: list[str] | None = None) -> int:
    """Run it; 1 when anything was lost or different."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.soak_endpoints", description=__doc__)
    parser.add_argument("--model", default="parlay-mini", help="what is served (default: parlay-mini)")
    parser.add_argument("--requests", type=int, default=2000, help="how many (default: 2,000)")
    parser.add_argument("--clients", type=int, default=8, help="how many at once (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="draws the requests (default: 0)")
    options = parser.parse_args(arguments)
    with served(options.model) as url:
        same, wrong = soak(url.removeprefix("http://"), options.requests, options.seed, options.clients)
    print(json.dumps({"same": dict(sorted(same.items())), "wrong": wrong[:20], "wrong in all": len(wrong)}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
