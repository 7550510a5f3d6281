"""Runs a greedy client: it always keeps COUNT requests of the highest priority running, until it is ended.

    python -m benchmarks.serving.greedy HOST:PORT KEY COUNT

Half of the requests have long prompts, and half ask for long answers. Replies are read and dropped.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys

from parlay.cli.race_prompts import PROSE

WORDS = 1_100
"""The number of words of a long prompt, about 1,500 tokens."""
URGENT = -16


def body(chance: random.Random) -> dict[str, object]:
    """Return the body of one request. Prompts are random, so none is found in a cache."""
    words = PROSE.text.split()
    long = chance.random() < 0.5
    text = " ".join(chance.choice(words) for _ in range(WORDS if long else 12))
    asked: dict[str, object] = {"prompt": text, "max_tokens": 24 if long else 256, "temperature": 1, "ignore_eos": True}
    return asked | {"priority": URGENT, "stream": True}


async def ask(host: str, port: int, key: str, sent: bytes) -> None:
    """Send one request on a connection of its own, and read its reply to the end."""
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n".encode() + sent)
    while await reader.read(1 << 16):
        pass
    writer.close()


async def main(address: str, key: str, count: int) -> None:
    """Send requests one after another; never returns."""
    host, _, port = address.partition(":")
    chance = random.Random(0)

    async def client() -> None:
        while True:
            await ask(host, int(port), key, json.dumps(body(chance)).encode())

    await asyncio.gather(*(client() for _ in range(count)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
