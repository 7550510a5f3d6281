"""Routing policies, which choose a server for each request by the number of requests that each server has."""

from __future__ import annotations

import hashlib
import heapq
import math
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from parlay.simulate.replica import Replica
from parlay.simulate.traffic import Arrival


class Router(Protocol):
    """Chooses a server for each request, among the servers that were added and not removed. There is at least one."""

    def add(self, replica: Replica) -> None: ...
    def remove(self, replica: Replica) -> None: ...
    def changed(self, replica: Replica) -> None:
        """Note that the load of a server may have changed."""
        ...

    def pick(self, request: Arrival) -> Replica: ...


class RoundRobin:
    """Picks one server after the other."""

    def __init__(self, seed: int) -> None:
        self._replicas: list[Replica] = []
        self._next = 0

    def add(self, replica: Replica) -> None:
        self._replicas.append(replica)

    def remove(self, replica: Replica) -> None:
        self._replicas.remove(replica)

    def changed(self, replica: Replica) -> None:
        """Do nothing: loads have no effect."""

    def pick(self, request: Arrival) -> Replica:
        self._next = (self._next + 1) % len(self._replicas)
        return self._replicas[self._next]


class LeastLoaded:
    """Picks the server with the fewest requests. Among equals it picks the one that was chosen longest ago."""

    def __init__(self, seed: int) -> None:
        self._heap: list[tuple[int, int, int, Replica]] = []
        self._valid: dict[int, int] = {}
        """Stamp of the one valid heap entry of each server, by the server's number. Older entries stay in the heap
        until they come up or the heap is too large."""
        self._chosen: dict[int, int] = {}
        self._stamp = 0

    def add(self, replica: Replica) -> None:
        self._chosen.setdefault(replica.number, 0)
        self._push(replica)

    def remove(self, replica: Replica) -> None:
        self._valid.pop(replica.number, None)

    def changed(self, replica: Replica) -> None:
        if replica.number in self._valid:
            self._push(replica)

    def pick(self, request: Arrival) -> Replica:
        while True:
            _, _, stamp, replica = self._heap[0]
            if self._valid.get(replica.number) == stamp:
                break
            heapq.heappop(self._heap)
        self._chosen[replica.number] = self._stamp
        return replica

    def _push(self, replica: Replica) -> None:
        self._stamp += 1
        self._valid[replica.number] = self._stamp
        heapq.heappush(self._heap, (replica.load, self._chosen[replica.number], self._stamp, replica))
        if len(self._heap) > 4 * len(self._valid) + 64:
            self._heap = [entry for entry in self._heap if self._valid.get(entry[3].number) == entry[2]]
            heapq.heapify(self._heap)


class TwoChoices:
    """Draws two servers at random and picks the one with fewer requests (Mitzenmacher 2001)."""

    def __init__(self, seed: int) -> None:
        self._replicas: list[Replica] = []
        self._draw = random.Random(f"{seed} two choices")

    def add(self, replica: Replica) -> None:
        self._replicas.append(replica)

    def remove(self, replica: Replica) -> None:
        self._replicas.remove(replica)

    def changed(self, replica: Replica) -> None:
        """Do nothing: loads are read when a server is picked."""

    def pick(self, request: Arrival) -> Replica:
        count = len(self._replicas)
        one, other = int(self._draw.random() * count), int(self._draw.random() * count)
        return min(self._replicas[one], self._replicas[other], key=lambda replica: replica.load)


class PrefixAffinity:
    """Picks the server that took earlier requests of the session, or else of the kind, unless it is overloaded.

    This is consistent hashing with bounded loads (Mirrokni et al. 2018). Servers have hashed points on a ring. A
    request starts at the hash of its session, or of its kind if it has no session. It takes the first server from there
    that has at most `BOUND` times its share of all unfinished requests.
    """

    BOUND = 1.25
    _POINTS = 32

    def __init__(self, seed: int) -> None:
        self._ring: list[tuple[int, int]] = []
        self._replicas: dict[int, Replica] = {}
        self._loads: dict[int, int] = {}
        self._total = 0

    def add(self, replica: Replica) -> None:
        self._replicas[replica.number] = replica
        self._loads[replica.number] = 0
        self.changed(replica)
        for point in range(self._POINTS):
            insort(self._ring, (_hashed(f"{replica.number} {point}"), replica.number))

    def remove(self, replica: Replica) -> None:
        del self._replicas[replica.number]
        self._total -= self._loads.pop(replica.number)
        self._ring = [entry for entry in self._ring if entry[1] != replica.number]

    def changed(self, replica: Replica) -> None:
        if replica.number in self._loads:
            self._total += replica.load - self._loads[replica.number]
            self._loads[replica.number] = replica.load

    def pick(self, request: Arrival) -> Replica:
        most = math.ceil(self.BOUND * (self._total + 1) / len(self._replicas))
        place = bisect_left(self._ring, (_hashed(request.session or request.kind), 0))
        for step in range(len(self._ring)):
            number = self._ring[(place + step) % len(self._ring)][1]
            if self._loads[number] < most:
                return self._replicas[number]
        return self._replicas[self._ring[place % len(self._ring)][1]]


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


ROUTERS: Mapping[str, Callable[[int], Router]] = MappingProxyType(
    {
        "least-loaded": LeastLoaded,
        "round-robin": RoundRobin,
        "two-choices": TwoChoices,
        "prefix-affinity": PrefixAffinity,
    }
)
"""Policies by name. A policy is constructed with the simulation's seed."""
