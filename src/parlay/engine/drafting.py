"""Budgets and proposals, and afterwards reports to drafters and policies.

A drafter or policy that raises costs its requests their drafts and nothing else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from functools import partial

from parlay.engine.admission import DraftAdmission
from parlay.engine.constrained import drafters_part
from parlay.engine.isolation import isolated
from parlay.engine.layers import TargetLayers
from parlay.engine.scheduler import Scheduler
from parlay.engine.sequence import Sequence
from parlay.engine.turn import Turn, charge, grouped
from parlay.types import NO_DRAFT, Draft, Drafter, Policy, Spent, Strategy


class Drafting:
    """Fills in the drafts of a step's turns, and reports their outcomes to drafters and policies."""

    def __init__(self, admission: DraftAdmission, scheduler: Scheduler, layers: TargetLayers) -> None:
        self._admission = admission
        self._scheduler = scheduler
        self._layers = layers
        self._planned: list[Sequence] = []
        """The sequences that could draft in the last step."""
        self._inactive = 0
        """For how many more steps of these sequences their policies are inactive."""
        self._is_inactive = False
        """Whether this step is one of those."""

    def propose(self, turns: list[Turn]) -> None:
        """Ask each drafter once for all its sequences, then settle what the target verifies."""
        ready = [turn for turn in turns if turn.at_root and turn.sequence.drafting]
        if not self._stays_inactive(turns, ready):
            self._inactive = sys.maxsize
            for group in _by_strategy(ready):
                self._draft(group[0].sequence.strategy, group)
        isolated(self._admission.add_forced, ready, _leave_out)
        self._admission.settle(ready)

    def _stays_inactive(self, turns: list[Turn], ready: list[Turn]) -> bool:
        """Whether policies are still inactive: the same sequences run as in the last step, and steps are left."""
        sequences = [turn.sequence for turn in ready]
        self._is_inactive = self._inactive > 0 and len(ready) == len(turns) and sequences == self._planned
        self._planned = sequences
        self._inactive -= self._is_inactive
        return self._is_inactive

    def _draft(self, strategy: Strategy, turns: list[Turn]) -> None:
        """One strategy's sequences."""
        assert strategy.drafter is not None
        began = time.perf_counter()
        isolated(partial(self._plan, strategy.policy), turns, _leave_out, again=False)
        needs = strategy.drafter.needs
        asked = [turn for turn in turns if turn.budget > 0]
        if needs.layers:
            asked = [turn for turn in asked if self._lend(turn)]
        elif needs.taps:
            for turn in asked:
                self._layers.lend(turn.sequence, 0)
        if asked:
            isolated(partial(self._ask, strategy, strategy.drafter), asked, _leave_out)
        self._layers.reclaim()
        charge([turn for turn in turns if turn.active], time.perf_counter() - began)

    def _plan(self, policy: Policy, turns: list[Turn]) -> None:
        """Set budgets, and note for how many more steps the policy gives none."""
        views = [turn.sequence for turn in turns]
        nodes, inactive = policy.plan(views)
        wanted = [(turn, budget) for turn, budget in zip(turns, nodes, strict=True) if budget > 0]
        self._inactive = min(self._inactive, 0 if wanted else inactive)
        for turn, budget in wanted:
            turn.active, turn.budget = True, min(budget, self._admission.limit(turn))

    def _lend(self, turn: Turn) -> bool:
        """Set memory aside for rows of the target's own layers. If there is little, lower the budget.

        The pending rows of the whole batch have their memory already, so the verify still fits whatever is written.
        A long pending run, as in prefill, would run twice: that is not worth it if it is longer than the budget.
        """
        if len(turn.pending) > turn.budget:
            return False
        while turn.budget and not self._scheduler.reserve_draft(turn.sequence, turn.budget):
            turn.budget //= 2
        if turn.budget:
            self._layers.lend(turn.sequence, turn.budget)
        return turn.budget > 0

    def _ask(self, strategy: Strategy, drafter: Drafter, turns: list[Turn]) -> None:
        drafts = drafter.propose([turn.sequence for turn in turns], [turn.budget for turn in turns])
        for turn, draft in zip(turns, drafts, strict=True):
            turn.draft = draft
        self._admission.admit(strategy, turns)

    def learn(self, turns: list[Turn], spent: Spent) -> None:
        """Report the outcome of all its sequences' drafts to each policy, in one call."""
        if self._is_inactive:
            return
        for group in _by_strategy([turn for turn in turns if turn.done.committed and turn.sequence.drafting]):
            isolated(partial(_learn, group[0].sequence.strategy.policy, spent), group, Turn.drop_drafter, again=False)

    def observe(self, turns: list[Turn]) -> None:
        """Report the step of all its sequences to each drafter that asks for it, in one call."""
        observed = [turn for turn in turns if _observes(turn)]
        for group in grouped(observed, lambda turn: id(turn.sequence.strategy.drafter)):
            began = time.perf_counter()
            isolated(_observe, group, Turn.drop_drafter, again=False)
            charge(group, time.perf_counter() - began)


def _leave_out(turn: Turn, error: Exception) -> None:
    """Verify nothing of what was proposed."""
    turn.budget, turn.draft = 0, NO_DRAFT
    turn.drop_drafter(error)


def _learn(policy: Policy, spent: Spent, turns: list[Turn]) -> None:
    """If forced tokens were added to a draft, the policy sees only the drafter's part."""
    views: list[Sequence] = []
    drafts: list[Draft] = []
    accepted: list[int] = []
    for turn in turns:
        draft = turn.draft if turn.sequence.request.constraint is None else drafters_part(turn.draft)
        if draft is not None:
            views.append(turn.sequence)
            drafts.append(draft)
            accepted.append(turn.done.accepted if draft is turn.draft else 0)
    if views:
        asked = [turn.draft_seconds for turn in turns if turn.active]
        seconds = sum(asked) / len(asked) if asked else 0.0
        policy.learn(views, drafts, accepted, Spent(seconds, spent.verify_seconds, spent.rows, spent.context))


def _observes(turn: Turn) -> bool:
    """A drafter sees the first step of a sequence, later those in which its policy is active, and tapped ones."""
    needs = turn.sequence.needs
    return bool(turn.taps) or (turn.at_root and needs.outcomes and (turn.active or turn.prefill))


def _observe(turns: list[Turn]) -> None:
    """Turns with one drafter."""
    drafter = turns[0].sequence.strategy.drafter
    assert drafter is not None
    drafter.observe([turn.observation() for turn in turns])


def _by_strategy(turns: list[Turn]) -> Iterable[list[Turn]]:
    """The turns that may draft, those of one strategy together."""
    drafting = [turn for turn in turns if turn.sequence.strategy.drafter is not None]
    return grouped(drafting, lambda turn: id(turn.sequence.strategy))
