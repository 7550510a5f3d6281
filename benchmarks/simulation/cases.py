"""Defines the cases of the simulator's validation: traffic, servers, loads, and the comparison of two outcomes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from parlay.cost.devices import machine
from parlay.cost.roofline import ModelShape
from parlay.simulate.costs import RooflineSteps, StepCost
from parlay.simulate.drafting import PLAIN, Drafting
from parlay.simulate.fleet import Outcome, Setup, simulate
from parlay.simulate.jobs import USUAL_LIMITS, ReplicaLimits
from parlay.simulate.mixtures import KINDS
from parlay.simulate.report import Figures, figures
from parlay.simulate.traffic import Arrival, Traffic

LOADS = (0.33, 0.65, 0.9, 1.3)
"""Loads as shares of a server's capacity."""
GOAL = 0.007
"""The largest difference from the engine in virtual time that any figure may have."""
SHOWN = ("tokens/s", "first p50", "first p90", "token p50", "token p90", "whole p50", "whole p90")

QWEN_7B = ModelShape(
    vocab_size=152_064,
    hidden_size=3584,
    intermediate_size=18_944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
)


def small_cpu(sequences: int, rows: float, head_rows: float, keys: float, pairs: float) -> float:
    """Return a step's seconds of SmolLM2-135M in four bits on two cores, roughly: 3.8 ms, and 2.6 times that with 16
    rows."""
    return (3.4 + 0.41 * rows + 4e-5 * pairs) / 1e3


@dataclass(frozen=True)
class Server:
    """A server of the validation."""

    name: str
    cost: StepCost
    limits: ReplicaLimits = USUAL_LIMITS
    drafting: Drafting = PLAIN


_CHAINS = Drafting("chains", 4, {"": (0.6,)}, adapts=False)
_LITTLE_MEMORY = ReplicaLimits(cache_tokens=12_000)

SERVERS = (
    Server("small model on a processor", small_cpu),
    Server("Qwen2.5-7B on an H100 by its maker's figures", RooflineSteps(machine("h100", "bfloat16"), QWEN_7B)),
    Server("the same processor, cache of 12,000 tokens", small_cpu, _LITTLE_MEMORY),
    Server("the same processor, chains of 4, right at 0.6", small_cpu, drafting=_CHAINS),
    Server("these chains, cache of 12,000 tokens", small_cpu, _LITTLE_MEMORY, _CHAINS),
)


def lengths(count: int, seed: int) -> list[tuple[int, int]]:
    """Draw prompt and answer lengths like those of chats and code, without long tails, so that a test has many
    requests soon."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        kind = KINDS["chat" if draw.random() < 0.7 else "code"]
        prompt = 1 + int(min(4000, kind.prompt * draw.lognormvariate(0.5, kind.spread)))
        found.append((prompt, 1 + int(min(1000, draw.expovariate(1 / kind.output)))))
    return found


def capacity(server: Server, sizes: Sequence[tuple[int, int]]) -> float:
    """Return the server's requests per second if all arrive at once."""
    traffic = Traffic("at once", [Arrival(0.0, prompt, output) for prompt, output in sizes])
    return len(sizes) / simulated(server, traffic).span


def arrivals(sizes: Sequence[tuple[int, int]], rate: float, seed: int) -> Traffic:
    """Return the requests at random times."""
    draw, now, found = random.Random(seed), 0.0, []
    for prompt, output in sizes:
        found.append(Arrival(now, prompt, output))
        now += draw.expovariate(rate)
    return Traffic(f"{rate:.3g} requests/s", found)


def simulated(server: Server, traffic: Traffic) -> Outcome:
    """Return the simulator's prediction."""
    return simulate(traffic, Setup(cost=server.cost, limits=server.limits, drafting=server.drafting))


def shown(outcome: Outcome) -> dict[str, float]:
    """Return the figures that are compared."""
    found: Figures = figures(outcome)
    assert found.first_token is not None
    assert found.per_token is not None
    assert found.whole is not None
    values = {"tokens/s": found.tokens_per_second}
    for name, each in (("first", found.first_token), ("token", found.per_token), ("whole", found.whole)):
        values |= {f"{name} p50": each.p50, f"{name} p90": each.p90}
    return values


def differences(real: Outcome, predicted: Outcome) -> dict[str, float]:
    """Return for each figure how far the prediction is above the measured one, as a share of it."""
    ours, truth = shown(predicted), shown(real)
    return {name: ours[name] / truth[name] - 1 for name in SHOWN}


def large_cpu(sequences: int, rows: float, head_rows: float, keys: float, pairs: float) -> float:
    """Return a step's seconds of a 14B model in four bits on sixteen cores, roughly: 120 ms, and 8 ms for each
    further row."""
    return 0.112 + 0.008 * rows + 2.8e-7 * pairs
