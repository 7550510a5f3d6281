"""Helpers for tests of the simulator: a cheap server, and traffic for it."""

from __future__ import annotations

import random

from parlay.simulate.drafting import PLAIN, Drafting
from parlay.simulate.fleet import Outcome, Setup, simulate
from parlay.simulate.jobs import USUAL_LIMITS, ReplicaLimits
from parlay.simulate.policies import ONE_REPLICA, Fleet
from parlay.simulate.traffic import Arrival, Traffic


def cost(sequences: int, rows: float, head_rows: float, keys: float, pairs: float) -> float:
    """A cost of 10 ms per step and 0.1 ms per row."""
    return 0.01 + 1e-4 * rows


def steady(count: int, gap: float, prompt: int = 100, output: int = 50) -> Traffic:
    """Make equal requests, one every ``gap`` seconds."""
    return Traffic("steady", [Arrival(place * gap, prompt, output) for place in range(count)])


def at_random(count: int, rate: float, seed: int = 1) -> Traffic:
    draw, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(Arrival(now, draw.randint(10, 900), draw.randint(1, 80)))
        now += draw.expovariate(rate)
    return Traffic("random", found)


def run(
    traffic: Traffic,
    fleet: Fleet = ONE_REPLICA,
    *,
    limits: ReplicaLimits = USUAL_LIMITS,
    drafting: Drafting = PLAIN,
    drain: float | None = None,
    seed: int = 0,
) -> Outcome:
    return simulate(traffic, Setup(cost=cost, limits=limits, drafting=drafting, fleet=fleet, drain=drain, seed=seed))
