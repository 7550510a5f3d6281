"""Simulates drafters with known acceptance and cost, and calls a router as an engine calls it."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from parlay.drafters.heads.guessing_ahead import with_probes
from parlay.router.arms import Arm
from parlay.router.goals import USUAL, Aim
from parlay.router.router import Router
from parlay.types import NO_DRAFT, Budgets, Cost, Draft, PowerModel, Spent, trees
from tests.router.views import REQUEST, SequenceView

RIGHT, WRONG = 0, 1
_FINDS, _RIGHT = 0, 1  # what chance decides
Rate = Callable[[int], float]
"""The share of nodes that are right after right ones, by the number of tokens of the sequence."""


def steep(rows: int) -> float:
    """Return the time of a forward in one-row forwards: each further row adds four percent."""
    return 1 + 0.04 * (rows - 1)


@dataclass
class TableCost:
    """Implements `Cost` with seconds of a forward that never change."""

    seconds: Callable[[int], float] = steep
    revision: int = 0

    def forward(self, rows: int, context: int) -> float:
        return self.seconds(rows)

    def record(self, rows: int, context: int, seconds: float) -> None:
        """Ignore the measurement."""


@dataclass(frozen=True)
class SimulatedArm:
    """The properties of a simulated drafter. Seconds are in one-row forwards."""

    rate: Rate
    replayable: bool = False
    most: int = 16
    score: float = 0.7
    step_seconds: float = 0.003
    node_seconds: float = 0.0
    opening_seconds: float = 0.0
    finds: Rate = lambda length: 1.0
    """The share of steps in which it proposes a draft."""
    dies_at: int = 1 << 30
    """The step from which on it fails."""
    domain: str = ""
    """The kind of requests for which it was trained."""
    slows: Callable[[int], float] = lambda step: 1.0
    """The factor by which it takes longer, by step."""
    expected: float = 0.0
    """The acceptance that its card states; see `Arm`."""
    sees_first: bool = False
    """Whether it needs to observe a step before it can draft in the next one; see `Arm`."""
    ahead: int = 0
    """Probe rows that each of its drafts adds. They guess the next draft; without them in the step before, it drafts
    nothing."""


@dataclass
class Run:
    """The result of a run."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    joules: float = 0.0
    watts: list[float] = field(default_factory=list)
    """The mean watts of each forward."""
    asked: list[dict[int, int]] = field(default_factory=list)
    """For each step: how often each arm was asked, over all sequences."""
    verified: Counter[str] = field(default_factory=Counter)
    """The number of steps by the arm whose draft was verified."""
    lengths: list[int] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class Machine:
    """Decodes sequences with a router and simulated arms. What an arm drafts does not depend on the router's choices.

    A hash of arm, sequence and place decides whether an arm is right about a token, so two runs differ only by the
    router's choices.
    """

    def __init__(
        self,
        arms: Sequence[SimulatedArm],
        cost: Cost | None = None,
        seed: int = 0,
        aim: Aim = USUAL,
    ) -> None:
        self.arms, self.seed, self._power = arms, seed, aim.power or PowerModel(1.0, 0.0, "measured: watts of 1")
        self.cost = cost or TableCost()
        self.router = Router(
            self.cost,
            [
                Arm(str(number), arm.most, arm.replayable, arm.domain, arm.expected, arm.sees_first)
                for number, arm in enumerate(arms)
            ],
            aim=aim,
        )
        self.run = Run()
        self.pause = 0
        self._opened: set[tuple[int, int]] = set()
        self._saw: dict[int, set[int]] = {}
        """By sequence: the arms that observed the step before. Before the first step, all arms count as observing."""
        self._sees: dict[int, set[int]] = {}
        """By sequence: the arms that observe this step."""
        self._guessed: dict[tuple[int, int], int] = {}
        """By sequence and arm: the length of the text whose continuation the last step's probe rows guess."""

    def decode(self, tokens: int, sequences: int = 1, first: int = 0, kind: str = "") -> Run:
        """Decode several sequences of one kind together, each to the same number of tokens."""
        request = replace(REQUEST, kind=kind)
        views = [SequenceView(first + number, request) for number in range(sequences)]
        self.pause = 0
        while min(len(view.tokens) for view in views) <= tokens:
            self.step(views)
        for view in views:
            self.router.release(view.sequence)
        return self.run

    def step(self, views: Sequence[SequenceView]) -> None:
        asks: dict[int, int] = {}
        spent = [0.0] * len(self.arms)
        drafts = [NO_DRAFT] * len(views)
        self._saw, self._sees = self._sees, {view.sequence: set() for view in views}
        for view in views:
            if view.sequence not in self._saw:
                self._saw[view.sequence] = set()
                self._sees[view.sequence] = set(range(len(self.arms)))
        if self.pause:
            self.pause -= 1
            called = False
        else:
            called = True
            budgets = self.router.plan(views)
            self._show(views, budgets)
            self.pause = 0 if any(budgets.nodes) else budgets.inactive
            while any(budgets.nodes):
                drafts = self._propose(views, budgets, drafts, asks, spent)
                budgets = self.router.next_budgets(views, self._offers)
                self._show(views, budgets)
            if any(map(len, drafts)) or asks:
                drafts = self.router.trim(views, drafts)
        self._finish(views, drafts, asks, spent, called)

    def _propose(
        self,
        views: Sequence[SequenceView],
        budgets: Budgets,
        drafts: list[Draft],
        asks: dict[int, int],
        spent: list[float],
    ) -> list[Draft]:
        self._offers: list[Draft | None] = [NO_DRAFT] * len(views)
        latest = list(drafts)
        for place, (view, nodes, number) in enumerate(zip(views, budgets.nodes, budgets.drafters, strict=True)):
            if not nodes:
                continue
            arm = self.arms[number]
            asks[number] = asks.get(number, 0) + 1
            self._sees[view.sequence].add(number)
            if self.run.steps >= arm.dies_at or (arm.sees_first and number not in self._saw[view.sequence]):
                self._offers[place] = None
                continue
            key = (view.sequence, number)
            opening = 0.0 if key in self._opened else arm.opening_seconds
            self._opened.add(key)
            spent[number] += (arm.step_seconds + nodes * arm.node_seconds) * arm.slows(self.run.steps) + opening
            latest[place] = self._offers[place] = self._draft(arm, number, view, nodes)
        return latest

    def _show(self, views: Sequence[SequenceView], budgets: Budgets) -> None:
        for view, watching in zip(views, budgets.watching, strict=bool(budgets.watching)):
            self._sees[view.sequence].update(watching)

    def _draft(self, arm: SimulatedArm, number: int, view: SequenceView, nodes: int) -> Draft:
        length = len(view.tokens)
        if arm.ahead and self._guessed.get((view.sequence, number)) != length:
            nodes = 0
        elif self._chance(number, view.sequence, length, _FINDS) >= arm.finds(length):
            return NO_DRAFT
        right = [
            self._chance(number, view.sequence, length + depth, _RIGHT) < arm.rate(length + depth)
            for depth in range(nodes)
        ]
        draft = trees.chain([RIGHT if each else WRONG for each in right], str(number), [arm.score] * nodes)
        return with_probes(draft, [arm.ahead] + [0] * nodes, str(number)) if arm.ahead else draft

    def _chance(self, *what: int) -> float:
        """Return a number in [0, 1) that depends on the seed and the arguments alone."""
        digest = hashlib.blake2b(array("q", (self.seed, *what)).tobytes(), digest_size=4).digest()
        return int.from_bytes(digest, "big") / 2**32

    def _finish(
        self,
        views: Sequence[SequenceView],
        drafts: Sequence[Draft],
        asks: dict[int, int],
        spent: list[float],
        called: bool,
    ) -> None:
        rows = len(views) + sum(map(len, drafts))
        context = sum(len(view.tokens) for view in views) // len(views)
        accepted = []
        for view, draft in zip(views, drafts, strict=True):
            tokens = draft.tree.tokens[: len(draft) - draft.probes]
            right = next((depth for depth, token in enumerate(tokens) if token != RIGHT), len(tokens))
            accepted.append(right)
            self.run.verified[draft.sources[0] if len(draft) else "none"] += 1
            view.tokens += [RIGHT] * (right + 1)
            if draft.probes:
                self._guessed[view.sequence, int(draft.sources[0])] = len(view.tokens)
        seconds = self.cost.forward(rows, context)
        if called:
            self.router.learn(
                views, drafts, accepted, Spent(sum(spent) / len(views), seconds, rows, context, tuple(spent))
            )
        self.run.asked.append(asks)
        self.run.lengths.append(len(views[0].tokens))
        self.run.steps += 1
        self.run.tokens += sum(accepted) + len(views)
        self.run.seconds += seconds + sum(spent)
        self.run.joules += self._power.watts * (seconds + sum(spent)) + self._power.row_joules * rows
        self.run.watts.append(self._power.mean(rows, seconds))
