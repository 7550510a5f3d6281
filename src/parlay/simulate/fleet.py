"""Simulates a fleet under traffic, event by event: arrivals, ends of steps, failures, starts and stops of servers."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from parlay.simulate.costs import StepCost
from parlay.simulate.drafting import PLAIN, Drafting
from parlay.simulate.jobs import USUAL_LIMITS, Job, ReplicaLimits
from parlay.simulate.policies import ONE_REPLICA, Failures, Fleet
from parlay.simulate.replica import Replica
from parlay.simulate.routing import ROUTERS
from parlay.simulate.traffic import Traffic
from parlay.types import FieldError


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """All inputs of a simulation besides the traffic.

    After the last arrival a fleet has ``drain`` seconds to finish. None means as long as the traffic took, and at least
    an hour.
    """

    cost: StepCost
    limits: ReplicaLimits = USUAL_LIMITS
    drafting: Drafting = PLAIN
    fleet: Fleet = ONE_REPLICA
    drain: float | None = None
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """The result of a simulation: times of each finished request, and counts of the servers. Times are in seconds.

    ``first`` and ``whole`` are the times from a request's arrival to its first and last token. ``per_token`` is the
    mean time between its tokens, below 0 if it has only one. ``span`` is the time from the first arrival to the last
    token. ``paid`` adds up the seconds in which servers existed. ``asked`` counts prompt tokens and ``found`` those
    that were cached. ``lost`` counts tokens that were written on servers that died, and then written again.
    """

    requests: int = 0
    finished: int = 0
    tokens: int = 0
    span: float = 0.0
    first: array[float] = field(default_factory=lambda: array("d"))
    per_token: array[float] = field(default_factory=lambda: array("d"))
    whole: array[float] = field(default_factory=lambda: array("d"))
    busy: float = 0.0
    paid: float = 0.0
    steps: int = 0
    rows: float = 0.0
    preemptions: int = 0
    asked: int = 0
    found: int = 0
    deaths: int = 0
    failed_over: int = 0
    lost: int = 0
    most_replicas: int = 0
    unfinished_after: float = 0.0
    """Seconds after the last arrival at which the simulation was stopped; 0 if all requests finished."""
    backlog: float = 0.0
    """Requests by which the queue grew per second of traffic; 0 if all requests finished."""


_LEAST_DRAIN = 3600.0


def simulate(traffic: Traffic, setup: Setup) -> Outcome:
    """Run the traffic through the fleet.

    Raises ValueError for a fleet without servers, traffic without requests, and an unknown routing policy.
    """
    if setup.fleet.replicas < 1:
        raise ValueError(f"a fleet needs at least 1 replica, got {setup.fleet.replicas}")
    if not traffic.arrivals:
        raise ValueError(f"{traffic.name} has no requests")
    if setup.fleet.routing not in ROUTERS:
        raise FieldError("routing", f"{setup.fleet.routing!r} is not known: choose one of {', '.join(ROUTERS)}")
    return _Simulation(traffic, setup).run()


class _Simulation:
    """One run: a heap of events, each with its time and the function that handles it."""

    def __init__(self, traffic: Traffic, setup: Setup) -> None:
        self._traffic, self._setup = traffic, setup
        self._router = ROUTERS[setup.fleet.routing](setup.seed)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._draw = random.Random(f"{setup.seed} failures")
        self._numbers = itertools.count()
        self._up: dict[int, Replica] = {}
        self._existing: dict[int, tuple[Replica, float]] = {}
        """The servers that are paid for, each with the time from which it is, by number."""
        self._draining: set[int] = set()
        self._starts: dict[int, int] = {}
        """How often each server has started. A failure that was drawn before its last start is ignored."""
        self._unrouted: deque[Job] = deque()
        """Requests that arrived while no server was up."""
        self._unfinished = 0
        self._wanted_since: tuple[int, float] = (0, 0.0)
        self._out = Outcome(requests=len(traffic.arrivals))

    def run(self) -> Outcome:
        arrivals, setup = self._traffic.arrivals, self._setup
        begin, end = arrivals[0].seconds, arrivals[-1].seconds
        stop = end + (setup.drain if setup.drain is not None else max(_LEAST_DRAIN, end - begin))
        self._start(begin)
        now = begin
        for number, request in enumerate(arrivals):
            self._until(request.seconds)
            self._unfinished += 1
            self._route(Job(request, number), request.seconds)
        self._until(end)
        at_end = self._unfinished
        while self._unfinished and self._events and self._events[0][0] <= stop:
            now, _, event = heapq.heappop(self._events)
            event(now)
        self._close(begin, max(now, end), at_end, stop - end)
        return self._out

    # ---------------------------------------------------------------------------------------------------- events

    def _at(self, seconds: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._order), event))

    def _until(self, seconds: float) -> None:
        """Handle all events before a time. Events at exactly that time stay, so that a request that arrives then is in
        the steps that begin then."""
        events = self._events
        while events and events[0][0] < seconds:
            now, _, event = heapq.heappop(events)
            event(now)

    def _route(self, job: Job, now: float) -> None:
        if not self._up:
            self._unrouted.append(job)
            return
        replica = self._router.pick(job.request)
        version = replica.version
        replica.submit(job, now)
        self._router.changed(replica)
        if replica.version != version:
            self._expect(replica)

    def _expect(self, replica: Replica) -> None:
        if replica.wake < math.inf:
            version = replica.version
            self._at(replica.wake, lambda now: self._finish(replica, version, now))

    def _finish(self, replica: Replica, version: int, now: float) -> None:
        if replica.version != version:
            return  # the event is obsolete: the server's steps were cut short, or it died
        done = replica.finish()
        for job in done:
            self._count(job)
        if done:
            self._router.changed(replica)
            if replica.number in self._draining and not replica.load:
                self._stop(replica, now)
        self._expect(replica)

    def _count(self, job: Job) -> None:
        out, request = self._out, job.request
        self._unfinished -= 1
        out.finished += 1
        out.tokens += request.output
        out.first.append(job.first - request.seconds)
        out.whole.append(job.last - request.seconds)
        out.per_token.append((job.last - job.first) / (request.output - 1) if request.output > 1 else -1.0)
        out.span = max(out.span, job.last)

    # --------------------------------------------------------------------------------------------- servers come and go

    def _start(self, now: float) -> None:
        scaling, failures = self._setup.fleet.autoscaling, self._setup.fleet.failures
        for _ in range(self._setup.fleet.replicas if scaling is None else scaling.min_replicas):
            self._open(now, now)
        if scaling is not None:
            self._at(now + scaling.scale_interval, self._scale)
        for seconds in failures.kills if failures is not None else ():
            self._at(now + seconds, self._kill_busiest)

    def _open(self, now: float, up: float) -> None:
        """Start a server, which is paid for from ``now`` on and takes requests from ``up`` on."""
        setup = self._setup
        replica = Replica(next(self._numbers), setup.cost, setup.drafting, setup.limits, setup.seed)
        self._existing[replica.number] = replica, now
        self._out.most_replicas = max(self._out.most_replicas, len(self._existing))
        if up > now:
            self._at(up, lambda now: self._join(replica, now))
        else:
            self._join(replica, now)

    def _join(self, replica: Replica, now: float) -> None:
        self._up[replica.number] = replica
        self._router.add(replica)
        failures = self._setup.fleet.failures
        if failures is not None and failures.mtbf is not None:
            life = self._starts[replica.number] = self._starts.get(replica.number, 0) + 1
            self._at(now + self._draw.expovariate(1 / failures.mtbf), lambda now: self._fail(replica, life, now))
        while self._unrouted:
            self._route(self._unrouted.popleft(), now)

    def _leave(self, replica: Replica) -> None:
        del self._up[replica.number]
        self._router.remove(replica)

    def _stop(self, replica: Replica, now: float) -> None:
        self._draining.discard(replica.number)
        _, since = self._existing.pop(replica.number)
        self._settle(replica, now - since)

    def _settle(self, replica: Replica, paid: float) -> None:
        out = self._out
        out.paid += paid
        out.busy += replica.busy
        out.steps += replica.steps
        out.rows += replica.rows
        out.preemptions += replica.preemptions
        out.asked += replica.asked
        out.found += replica.found

    def _kill_busiest(self, now: float) -> None:
        if self._up:
            self._die(max(self._up.values(), key=lambda replica: replica.load), now)

    def _fail(self, replica: Replica, life: int, now: float) -> None:
        if self._starts[replica.number] == life:
            self._die(replica, now)

    def _die(self, replica: Replica, now: float) -> None:
        failures = self._setup.fleet.failures
        if failures is None or (replica.number not in self._up and replica.number not in self._draining):
            return
        if replica.number in self._up:
            self._leave(replica)
        self._out.deaths += 1
        for job in replica.kill(now):
            self._fail_over(job, now, failures)
        if replica.number in self._draining:
            self._stop(replica, now)
        else:
            self._at(now + failures.down_time, lambda now: self._join(replica, now))

    def _fail_over(self, job: Job, now: float, failures: Failures) -> None:
        self._out.failed_over += 1
        job.failures += 1
        if failures.on_failure == "retry":
            self._out.lost += job.written
            job.written, job.first = 0, -1.0
        self._at(now + failures.detect_delay, lambda now: self._route(job, now))

    def _scale(self, now: float) -> None:
        """Compare the wanted number of servers with the present one, and start or drain servers if they differ."""
        scaling = self._setup.fleet.autoscaling
        assert scaling is not None
        have = len(self._existing) - len(self._draining)
        wanted = min(
            scaling.max_replicas, max(scaling.min_replicas, math.ceil(self._unfinished / scaling.target_ongoing))
        )
        way = (wanted > have) - (wanted < have)
        if way != self._wanted_since[0]:
            self._wanted_since = way, now
        waited = now - self._wanted_since[1]
        if way > 0 and waited >= scaling.up_delay:
            for _ in range(wanted - have):
                self._open(now, now + scaling.start_delay)
        elif way < 0 and waited >= scaling.down_delay:
            idlest = sorted(self._up.values(), key=lambda replica: (replica.load, -replica.number))
            for replica in idlest[: min(have - wanted, len(self._up) - 1)]:
                self._leave(replica)
                self._draining.add(replica.number)
                if not replica.load:
                    self._stop(replica, now)
        self._at(now + scaling.scale_interval, self._scale)

    def _close(self, begin: float, now: float, at_end: int, drain: float) -> None:
        out = self._out
        out.span = (now if self._unfinished else out.span) - begin
        if self._unfinished:
            out.unfinished_after = drain
            out.backlog = at_end / max(1e-9, self._traffic.span)
        for replica, since in self._existing.values():
            self._settle(replica, now - since)
