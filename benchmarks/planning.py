"""Times a router's work in a step: the seconds of a policy's four calls, by the number of concurrent sequences.

Drafters, forwards and their seconds are simulated. Drafting pays in all sequences, and the copying drafter finds a
draft in half of the steps.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.commands import one_line_errors
from benchmarks.options import command_parser
from benchmarks.pages import table
from parlay.bench.provenance import provenance
from parlay.router.arms import Arm
from parlay.router.router import Router
from parlay.types import NO_DRAFT, Draft, NoiseKey, Request, SamplingParams, Spent, trees

COPYING, HEAD = Arm("copying", 32, replayable=True), Arm("head", 8)
ARMS = {"one that copies": (COPYING,), "one that copies, and a head": (COPYING, HEAD)}
GOALS = {1: 100e-6, 64: 1e-3}
"""The goals in seconds, by number of concurrent sequences."""
WARM, STEPS = 100, 400
RIGHT, WRONG = 0, 1
_RATE = 0.8  # probability of a right node after right ones
ROW, FIRST = 0.05e-3, 8e-3
"""Seconds of each further row and of a forward of one row. Rows are so cheap that drafting pays at all loads."""


class Forwards:
    """Implements `Cost` with fixed costs."""

    revision = 0

    def forward(self, rows: int, context: int) -> float:
        return FIRST + ROW * (rows - 1)

    def record(self, rows: int, context: int, seconds: float) -> None:
        """Ignore the measurement."""


REQUEST = Request(id="r", prompt=(1,), params=SamplingParams(max_tokens=None), key=NoiseKey(0))


@dataclass
class View:
    """Implements the view of a sequence that the router gets."""

    sequence: int
    request: Request = REQUEST
    tokens: list[int] = field(default_factory=lambda: [1] * 100)
    prompt_length: int = 1
    layers: None = None


class Steps:
    """Simulates steps of a batch. ``seconds`` has the router's own time in each step."""

    def __init__(self, arms: Sequence[Arm], sequences: int) -> None:
        self._arms = arms
        self._router = Router(Forwards(), arms)
        self._views = [View(number) for number in range(sequences)]
        self._coin = random.Random(0)
        self.seconds: list[float] = []

    def step(self) -> None:
        """Run one step, in which the router asks the drafters that it chooses."""
        router, views, own = self._router, self._views, 0.0
        drafts, spent = [NO_DRAFT] * len(views), [0.0] * len(self._arms)
        began = time.perf_counter()
        budgets = router.plan(views)
        while any(budgets.nodes):
            own += time.perf_counter() - began
            offers = self._proposed(budgets.nodes, budgets.drafters, spent)
            drafts = [offer if len(offer) else draft for offer, draft in zip(offers, drafts, strict=True)]
            began = time.perf_counter()
            budgets = router.next_budgets(views, offers)
        drafts = router.trim(views, drafts) if any(map(len, drafts)) else drafts
        own += time.perf_counter() - began
        accepted = [self._accept(view, draft) for view, draft in zip(views, drafts, strict=True)]
        rows = len(views) + sum(map(len, drafts))
        told = Spent(0.0, FIRST + ROW * (rows - 1), rows, 100, tuple(spent), own)
        began = time.perf_counter()
        router.learn(views, drafts, accepted, told)
        self.seconds.append(own + time.perf_counter() - began)

    def _proposed(self, nodes: Sequence[int], drafters: Sequence[int], spent: list[float]) -> list[Draft]:
        offers: list[Draft] = []
        for most, number in zip(nodes, drafters, strict=True):
            spent[number] += (1e-5 if self._arms[number].replayable else 1e-4) * bool(most)
            found = self._coin.random() < 0.5 or not self._arms[number].replayable
            offers.append(self._draft(min(most, 6)) if most and found else NO_DRAFT)
        return offers

    def _draft(self, nodes: int) -> Draft:
        right = next((depth for depth in range(nodes) if self._coin.random() > _RATE), nodes)
        tokens = [RIGHT if depth < right else WRONG for depth in range(nodes)]
        return trees.chain(tokens, "made up", [(depth + 3) / (depth + 5) for depth in range(nodes)])

    def _accept(self, view: View, draft: Draft) -> int:
        tokens = draft.tree.tokens
        right = next((depth for depth, token in enumerate(tokens) if token != RIGHT), len(tokens))
        view.tokens += [RIGHT] * (right + 1)
        return right


def measure(arms: Sequence[Arm], sequences: int, steps: int = STEPS) -> float:
    """Return the median seconds of a step, after the router has learned about its drafters."""
    batch = Steps(arms, sequences)
    for _ in range(WARM + steps):
        batch.step()
    return statistics.median(batch.seconds[WARM:])


@one_line_errors("planning")
def main() -> None:
    """Measure, and print the table."""
    command_parser("planning", __doc__).parse_args()
    print(provenance("python -m benchmarks.planning"))
    rows = [
        (name, str(sequences), f"{1e6 * measure(arms, sequences):.0f}", f"{1e6 * goal:.0f}")
        for name, arms in ARMS.items()
        for sequences, goal in GOALS.items()
    ]
    print("\n".join(table(("drafters", "at once", "microseconds per step", "goal"), rows)))


if __name__ == "__main__":
    main()
