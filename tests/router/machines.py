"""Simulates machines on which other processes run, and strategies that decode on them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from parlay.cost.measured import MeasuredCost
from parlay.router.policies import adaptive
from parlay.router.router import Router
from parlay.types import Spent, trees
from tests.router.views import SequenceView

Delay = Callable[[int, random.Random], float]
"""The factor by which work takes longer in this step. It is drawn separately for the forward and for drafting."""

STALL = 0.3  # of a forward: what one hold-up of something short takes, times the factor


def steep(rows: int) -> float:
    """Return the time of a forward in one-row forwards: each further row adds four percent."""
    return 1 + 0.04 * (rows - 1)


def idle(step: int, coin: random.Random) -> float:
    return 1.0


def spikes(share: float, factor: float) -> Delay:
    """Return a delay: a random share of all steps takes ``factor`` times as long."""
    return lambda step, coin: factor if coin.random() < share else 1.0


def bursts(every: int, lasting: int, factor: float) -> Delay:
    """Return a delay: in every ``every`` steps, nearly all of ``lasting`` successive steps take ``factor`` times as
    long."""
    return lambda step, coin: factor if step % every >= every - lasting and coin.random() < 0.8 else 1.0


def phases(lasting: int, factor: float) -> Delay:
    """Return a delay: the machine is slower for ``lasting`` steps, then normal for as many, and so on."""
    return lambda step, coin: factor if step // lasting % 2 else 1.0


@dataclass
class Drafting:
    """The properties of a simulated drafter; see `simulate`. Seconds are in one-row forwards."""

    rate: float  # at which nodes are accepted after accepted ones
    score: float = 0.7
    node_seconds: float = 0.0
    step_seconds: float = 0.02
    covers: float = 1.0  # share of steps in which it finds anything


@dataclass
class Outcome:
    """The result, in seconds that the same steps would take on an idle machine."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    drafted: int = 0  # steps with a draft

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def simulate(
    drafting: Drafting,
    delay: Delay,
    tokens: int,
    *,
    cost: MeasuredCost | None = None,
    policy: Router | None = None,
    requests: int = 1,
    seed: int = 0,
    budget: int = 16,
    true: Callable[[int], float] = steep,
) -> Outcome:
    """Decode requests, one after another, as the engine drives a policy and its measured cost."""
    coin, noise = random.Random(seed), random.Random(seed + 1000)
    cost = cost if cost is not None else MeasuredCost({rows: true(rows) for rows in (1, 2, 4, 8, 16, 32)})
    policy = policy or adaptive(cost, budget)
    run = Outcome()
    for number in range(requests):
        view, inactive = SequenceView(number), 0
        while len(view.tokens) <= tokens:
            asked = inactive == 0
            (wanted,), inactive, *_ = policy.plan([view]) if asked else ([0], inactive - 1)
            found = wanted if coin.random() < drafting.covers else 0
            right = 0
            while right < found and coin.random() < drafting.rate:
                right += 1
            draft = trees.chain([0] * found, "toy", [drafting.score] * found)
            if wanted:
                policy.next_budgets([view], [draft])
                (draft,) = policy.trim([view], [draft])
            accepted = min(right, len(draft))
            context, rows = len(view.tokens), 1 + len(draft)
            view.tokens += [0] * accepted + [int(accepted == right)]
            drafted = wanted * drafting.node_seconds + bool(wanted) * drafting.step_seconds
            verified = true(rows)
            slower = delay(run.steps, noise), delay(run.steps, noise) - 1
            verify_seconds = verified * slower[0] * noise.uniform(1, 1.1)
            draft_seconds = drafted * (1 + slower[1]) + bool(wanted and slower[1]) * STALL * slower[1]
            if asked:
                policy.learn(
                    [view], [draft], [accepted], Spent(draft_seconds, verify_seconds, rows, context, (draft_seconds,))
                )
            cost.record(rows, context, verify_seconds)
            run.steps += 1
            run.tokens += accepted + 1
            run.seconds += drafted + verified
            run.drafted += bool(len(draft))
        policy.release(number)
    return run
