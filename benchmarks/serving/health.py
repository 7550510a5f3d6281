"""Asks a server for its health again and again until standard input ends, and prints how long its answers took.

python -m benchmarks.serving.health HOST:PORT
"""

from __future__ import annotations

import http.client
import json
import select
import sys
import time
from statistics import median

PAUSE = 0.01


def watch(address: str) -> list[float]:
    """Return the seconds of each answer. Raises ValueError for a wrong answer, and an error of the connection if it
    is lost."""
    connection = http.client.HTTPConnection(address, timeout=60)
    seconds: list[float] = []
    while not seconds or not select.select([sys.stdin], [], [], PAUSE)[0]:
        began = time.perf_counter()
        connection.request("GET", "/health")
        reply = connection.getresponse()
        if reply.status != 200 or reply.read() != b'{"status":"ok"}':
            raise ValueError(f"health answered {reply.status}")
        seconds.append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    taken = watch(sys.argv[1])
    slow = sum(one > 0.1 for one in taken)
    print(json.dumps({"asked": len(taken), "median": median(taken), "longest": max(taken), "slow": slow}))
