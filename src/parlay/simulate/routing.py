"""Which server takes a request. All policies see the servers that are up, and the number of requests of each."""

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
    """Chooses among the servers that were added and not removed; there is at least one."""

    def add(self, replica: Replica) -> None: ...
    def remove(self, replica: Replica) -> None: ...
    def changed(self, replica: Replica) -> None:
        """The load of a server that was added has changed."""
        ...

    def pick(self, request: Arrival) -> Replica: ...


class RoundRobin:
    """One server after the other."""

    def __init__(self, seed: int) -> None:
        self._replicas: list[Replica] = []
        self._next = 0

    def add(self, replica: Replica) -> None:
        self._replicas.append(replica)

    def remove(self, replica: Replica) -> None:
        self._replicas.remove(replica)

    def changed(self, replica: Replica) -> None:
        """Loads have no effect."""

    def pick(self, request: Arrival) -> Replica:
        self._next = (self._next + 1) % len(self._replicas)
        return self._replicas[self._next]


class LeastLoaded:
    """The server with the fewest requests; among equals the one chosen longest ago."""

    def __init__(self, seed: int) -> None:
        self._heap: list[tuple[int, int, int, Replica]] = []
        self._valid: dict[int, int] = {}
        """By server: the sequence number of its one valid heap entry."""
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
    """The one with fewer requests of two servers drawn at random."""

    def __init__(self, seed: int) -> None:
        self._replicas: list[Replica] = []
        self._draw = random.Random(f"{seed} two choices")

    def add(self, replica: Replica) -> None:
        self._replicas.append(replica)

    def remove(self, replica: Replica) -> None:
        self._replicas.remove(replica)

    def changed(self, replica: Replica) -> None:
        """Loads are read when a server is picked."""

    def pick(self, request: Arrival) -> Replica:
        count = len(self._replicas)
        one, other = int(self._draw.random() * count), int(self._draw.random() * count)
        return min(self._replicas[one], self._replicas[other], key=lambda replica: replica.load)


class PrefixAffinity:
    """Picks the server that had the session, or the kind's common beginning, unless it is overloaded.

    Consistent hashing with bounded loads (Mirrokni et al. 2018): servers lie on a ring at hashed points, and a request
    goes to the first one behind the hash of its session, or of its kind, that has no more than `BOUND` times its share
    of all requests under way.
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
"""Policies by name; each is made with the simulation's seed."""
